-- KEYS[1] the message's key, KEYS[2] its attempts; ARGV[1] our token, ARGV[2] lease and ARGV[3] retention in milliseconds.
-- Returns 0 when it was handled before, -1 while another member handles it, else the number of this attempt.
local holder = redis.call('GET', KEYS[1])
if holder == 'done' then
  return 0
end
if holder and holder ~= ARGV[1] then
  return -1
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local attempt = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return attempt
