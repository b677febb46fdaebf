#!lua flags=allow-oom
-- Leaves what the leader's caretaker says, for `status`. It is forgotten by itself once nobody says it any more.
--
-- KEYS: the report. ARGV: the report as JSON; after how many seconds it is forgotten.
--
-- One small key, written over: a Redis that is full lets it pass (allow-oom), since that is what it tells of.
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'at_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), 'report', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
