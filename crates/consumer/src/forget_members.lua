-- KEYS[1] stream; ARGV[1] group, ARGV[2] the caller's name, ARGV[3] idle time in milliseconds.
-- Deletes the names of members that have been silent for so long and hold nothing. The look and the
-- deletion are one step, since deleting a name deletes its pending entries. Returns how many are gone.
local gone = 0
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local member = {}
  for i = 1, #info, 2 do
    member[info[i]] = info[i + 1]
  end
  if member['name'] ~= ARGV[2] and member['pending'] == 0 and member['idle'] >= tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], member['name'])
    gone = gone + 1
  end
end
return gone
