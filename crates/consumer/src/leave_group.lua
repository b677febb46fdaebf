-- KEYS[1] stream; ARGV[1] group, ARGV[2] the member's name, ARGV[3] claim time in milliseconds.
-- Returns how many entries the member still holds; with 0 its name is gone.
local held = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000, ARGV[2])
if #held == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return 0
end
for _, entry in ipairs(held) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'IDLE', ARGV[3], 'JUSTID')
end
return #held
