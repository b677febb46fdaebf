#!lua
-- Adds entries of a replay and records how far it has come, in one atomic step.
--
-- KEYS: the marker, the replay's progress, then the streams.
-- ARGV: outbox id and branch that the marker must have; the id that the replay must have come to ('' before its first
--   step); the number of topics and, for each, its name and its layout as the marker must have it ('' for none); the number
--   of entries and, for each, the index of its stream in KEYS, the number of arguments and those (fields and values); the
--   number of arguments for the progress and those; after how many seconds it is forgotten, 0 for never.
--
-- Without the marker nothing is added: beside an empty Redis, entries of a replay would look like what was published. A topic
-- that is held back waits for its streams to be drained, and takes no entry meanwhile.

local marker = redis.call('HMGET', KEYS[1], 'outbox_id', 'branch')
if marker[1] ~= ARGV[1] then return {'foreign', marker[1] or ''} end
if marker[2] ~= ARGV[2] then return {'history', ''} end
local come_to = redis.call('HMGET', KEYS[2], 'next')[1] or ''
if come_to ~= ARGV[3] then return {'moved', come_to} end

local at = 5
for _ = 1, tonumber(ARGV[4]) do
  local of = redis.call('HMGET', KEYS[1], 'blocked:topic ' .. ARGV[at], 'topic:' .. ARGV[at])
  if of[1] then return {'held', ARGV[at]} end
  if (of[2] or '') ~= ARGV[at + 1] then return {'layout', ARGV[at]} end
  at = at + 2
end

local added = {}
local entries = tonumber(ARGV[at])
at = at + 1
for entry = 1, entries do
  local key, last = KEYS[tonumber(ARGV[at])], at + 1 + tonumber(ARGV[at + 1])
  local id = redis.pcall('XADD', key, '*', unpack(ARGV, at + 2, last))
  if type(id) == 'table' then
    -- Redis does not roll back: what was added would be added again with the next try.
    for _, one in ipairs(added) do redis.call('XDEL', one[1], one[2]) end
    return {'refused', key .. ': ' .. id.err}
  end
  added[entry] = {key, id}
  at = last + 1
end

redis.call('HSET', KEYS[2], unpack(ARGV, at + 1, at + tonumber(ARGV[at])))
local keep_s = tonumber(ARGV[#ARGV])
-- A user without that right leaves it for good.
if keep_s > 0 then redis.pcall('EXPIRE', KEYS[2], keep_s) end
return {'done', ''}
