#!lua
-- Publishes one page: its entries, the marker and the gaps that changed, in one atomic step.
--
-- KEYS: the marker, the gaps, then the streams of the page.
-- ARGV: leadership, page and number of parcels; for each parcel the number of its entries and those, packed as
--   MessagePack: the index of the stream in KEYS, the number of arguments and those (fields and values);
--   the number of marker arguments and those (fields and values); the number of marker fields to drop and
--   those; the number of gaps to drop and their first ids; the number of gap arguments and those (first
--   and last ids).
--
-- A script without flags is refused as a whole when Redis is out of memory, read-only or unable to
-- persist, so what can fail below is one stream.

local CHUNK = 4000 -- arguments of one call; Lua's stack holds about 8000

local found = redis.call('HMGET', KEYS[1], 'leadership', 'page', 'epoch')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] then
  return {'moved', found[3] or '', found[2] or ''}
end

-- Removing an entry that cannot exist is refused where the key is no stream, or may not be undone.
for index = 3, #KEYS do
  local reply = redis.pcall('XDEL', KEYS[index], '0-0')
  if type(reply) == 'table' then
    return {'refused', tostring(index), reply.err}
  end
end

-- Reads the arguments of an entry and adds it, in one go: they never become a table.
local key, next_at
local function add(at, ...)
  next_at = at
  return redis.pcall('XADD', key, '*', ...)
end

local at = 4
local keys, ids, added = {}, {}, 0
for _ = 1, tonumber(ARGV[3]) do
  local parcel = ARGV[at + 1]
  next_at = 0
  for _ = 1, tonumber(ARGV[at]) do
    local from, index, width = cmsgpack.unpack_limit(parcel, 2, next_at)
    key = KEYS[index]
    local id = add(cmsgpack.unpack_limit(parcel, width, from))
    if type(id) == 'table' then
      -- Redis does not roll back: what was added would be added again with the next try.
      for entry = 1, added do
        redis.call('XDEL', keys[entry], ids[entry])
      end
      return {'refused', tostring(index), id.err}
    end
    added = added + 1
    keys[added], ids[added] = key, id
  end
  at = at + 2
end

local function each_chunk(command, key)
  local last = at + tonumber(ARGV[at])
  local first = at + 1
  while first <= last do
    redis.call(command, key, unpack(ARGV, first, math.min(first + CHUNK - 1, last)))
    first = first + CHUNK
  end
  at = last + 1
end

local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'redis_ms', now_ms)
each_chunk('HSET', KEYS[1])
each_chunk('HDEL', KEYS[1])
each_chunk('HDEL', KEYS[2])
each_chunk('HSET', KEYS[2])
return {'published', now_ms}
