#!lua
-- A page of one message: adds its entry and writes the marker.
--
-- KEYS: the marker, the stream.
-- ARGV: leadership and page that the marker must have; the number of marker arguments and those (fields and values,
--   first `redis_ms`, which is set here); the fields and values of the entry.
--
-- Returns Redis' clock in milliseconds, or nothing where it did nothing.

local found = redis.pcall('HMGET', KEYS[1], 'leadership', 'page')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] then
  return false
end

local time = redis.call('TIME')
ARGV[5] = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))

local last = 3 + ARGV[3]
local added = redis.pcall('XADD', KEYS[2], '*', unpack(ARGV, last + 1))
if type(added) ~= 'string' then
  return false
end
if type(redis.pcall('HSET', KEYS[1], unpack(ARGV, 4, last))) ~= 'number' then
  redis.call('XDEL', KEYS[2], added)
  return false
end
return ARGV[5]
