#!lua
-- A page of one message: adds its entry and writes the marker. A message that comes alone waits for all of this, mostly with
-- cold caches, where each call and each argument counts.
--
-- KEYS: the marker, the stream.
-- ARGV: leadership and page that the marker must have; four fields of the marker and their values, first `redis_ms`, which
--   is set here; the fields and values of the entry.
--
-- Returns Redis' clock in milliseconds, or nothing where it did nothing.

local marker = KEYS[1]
local found = redis.pcall('HMGET', marker, 'leadership', 'page')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] then
  return false
end

-- Before anything is written: an error here, as of a missing right, must leave nothing.
local time = redis.call('TIME')
ARGV[4] = time[1] .. string.sub(1000000 + time[2], 2, 4)

local added = redis.pcall('XADD', KEYS[2], '*', unpack(ARGV, 11))
if type(added) ~= 'string' then
  return false
end
if type(redis.pcall('HSET', marker, unpack(ARGV, 3, 10))) ~= 'number' then
  redis.call('XDEL', KEYS[2], added)
  return false
end
return ARGV[4]
