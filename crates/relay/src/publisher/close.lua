#!lua
-- Closes a page: writes the marker and the gaps that changed, or takes back the entries that were added.
--
-- KEYS: the marker, the gaps, the note, then the streams of the page.
-- ARGV: leadership and page that the marker must have; for each stream the number of entries it should have got; the
--   number of marker arguments and those (fields and values, first `redis_ms`, which is set here); the number of marker
--   fields to drop and those; the number of gaps to drop and their first ids; the number of gap arguments and those
--   (first and last ids).

local CHUNK = 4000 -- arguments of one call; Lua's stack holds about 8000
local STREAMS = 3 -- keys before the first stream

local found = redis.pcall('HMGET', KEYS[1], 'leadership', 'page', 'epoch')
local ours = found[1] == ARGV[1] and found[2] == ARGV[2]

-- The note of an earlier page would have that page's entries taken for what this one added.
local note = redis.call('HMGET', KEYS[3], 'of', 'lengths')
if note[1] ~= ARGV[1] .. ' ' .. ARGV[2] then
  return redis.error_reply('ERR the page was not opened')
end

local whole, added, index = true, {}, STREAMS
for before in string.gmatch(note[2], '%S+') do
  index = index + 1
  local now = before ~= '-' and redis.pcall('XLEN', KEYS[index])
  added[index] = type(now) == 'number' and now - before or 0
  whole = whole and added[index] == tonumber(ARGV[index - 1])
end

-- Redis does not roll back: what was added would be added again with the next try, or is another leader's to add.
-- Asked for before anything is kept: the right may have been taken away.
local time = redis.pcall('TIME')
if not (ours and whole) or time.err then
  for index = STREAMS + 1, #KEYS do
    if added[index] > 0 then
      for _, entry in ipairs(redis.call('XREVRANGE', KEYS[index], '+', '-', 'COUNT', added[index])) do
        redis.call('XDEL', KEYS[index], entry[1])
      end
    end
  end
  if not ours then
    return {'moved', found[3] or '', found[2] or ''}
  end
  return time.err and time or {'refused'}
end

local at = 3 + #KEYS - STREAMS
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
ARGV[at + 2] = now_ms

local function each_chunk(command, key)
  local last = at + tonumber(ARGV[at])
  local first = at + 1
  while first <= last do
    redis.call(command, key, unpack(ARGV, first, math.min(first + CHUNK - 1, last)))
    first = first + CHUNK
  end
  at = last + 1
end

each_chunk('HSET', KEYS[1])
each_chunk('HDEL', KEYS[1])
each_chunk('HDEL', KEYS[2])
each_chunk('HSET', KEYS[2])
return {'published', now_ms}
