-- KEYS[1] stream; ARGV[1] group, ARGV[2] the member's name, then the ids of entries that it has in hand.
-- Sets their idle time back, but only of those that are still its own. Returns how many that are.
local kept = 0
for i = 3, #ARGV do
  local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #mine == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    kept = kept + 1
  end
end
return kept
