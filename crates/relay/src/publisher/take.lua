#!lua
-- Takes the leadership: replaces marker and gaps, if the marker is still the one that was read.
--
-- KEYS: the marker, the gaps, and the note of the page under way.
-- ARGV: leadership and page of the marker that was read, both empty for none; the number of marker
--   arguments and those (fields and values); the number of gap arguments and those (first and last ids).

local CHUNK = 4000 -- arguments of one call; Lua's stack holds about 8000

local found = redis.call('HMGET', KEYS[1], 'leadership', 'page', 'epoch')
if (found[1] or '') ~= ARGV[1] or (found[2] or '') ~= ARGV[2] then
  return {'moved', found[3] or '', found[2] or ''}
end

-- A right that the scripts of a page lack must show here, where nothing is left half done.
local note = KEYS[3]
for _, command in ipairs({
  {'DEL', note}, {'HSET', note, 'lengths', ''}, {'HMGET', note, 'lengths'}, {'HDEL', note, 'lengths'},
  {'XLEN', note}, {'XREVRANGE', note, '+', '-'}, {'XDEL', note, '0-0'}, {'TIME'},
}) do
  local reply = redis.pcall(unpack(command))
  if type(reply) == 'table' and reply.err then
    return {'lacks', command[1], reply.err}
  end
end

redis.call('DEL', KEYS[1], KEYS[2])
local at = 3
for index = 1, 2 do
  local last = at + tonumber(ARGV[at])
  local first = at + 1
  while first <= last do
    redis.call('HSET', KEYS[index], unpack(ARGV, first, math.min(first + CHUNK - 1, last)))
    first = first + CHUNK
  end
  at = last + 1
end
return {'taken'}
