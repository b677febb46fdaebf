#!lua flags=no-writes
-- Says where a stream begins and ends, without sending what stands there. KEYS: the stream.
-- Returns nothing where there is no entry; else the first and the last entry, and 1 if the last is a message of a relay
-- (trim.lua goes by the same).
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not first or not last then return {} end
local is_ours = last[2][1] == 'id' and last[2][3] == 'message_key'
return {first[1], last[1], is_ours and '1' or '0'}
