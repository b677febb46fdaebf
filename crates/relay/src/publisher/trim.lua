#!lua flags=allow-oom
-- Tends one stream in one atomic step: trims what is old and that every group has acknowledged, and says how far the
-- groups have got. A group that is made, set back or given entries at the same time is never passed over.
--
-- KEYS: the stream, the record of what was trimmed.
-- ARGV: entries older than this many milliseconds may go (0: none may); entries from this time on stay (milliseconds,
--   of proofs that the relay's next take-over looks for); how many may go in one step; then the groups that are asked about.
-- Returns nothing where there is no entry. Else: entries trimmed; 1 if there may be more to trim; number of groups; 1 if
--   the first entry is past the age; the last entry; and for each group asked about the oldest entry that it has not
--   acknowledged, '' where it has acknowledged all, 'absent' where there is no such group.
--
-- Trimming frees memory, so a Redis that is full lets it pass (allow-oom).

-- Ids are compared as digits: a number in Lua has 53 bits and theirs have 64.
local function less_digits(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function less(a, b)
  local a_ms, a_sequence = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_sequence = string.match(b, '^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return less_digits(a_ms, b_ms) end
  return less_digits(a_sequence, b_sequence)
end

if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then return {} end
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then return {} end

-- Where each group stands: the last entry that it was given, and the oldest one that it has not acknowledged.
local groups, count = {}, 0
for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for at = 1, #fields, 2 do group[fields[at]] = fields[at + 1] end
  local given, oldest = group['last-delivered-id'], nil
  if group['pending'] > 0 then oldest = redis.call('XPENDING', KEYS[1], group['name'])[2] end
  groups[group['name']] = {given = given, oldest = oldest or nil}
  count = count + 1
end

local trimmed, more, is_overdue = 0, 0, 0
local age_ms = tonumber(ARGV[1])
if age_ms > 0 then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local cut_ms = math.max(0, math.min(now_ms - age_ms, tonumber(ARGV[2])))
  local cut = string.format('%.0f-0', cut_ms)
  if less(first[1], string.format('%.0f-0', math.max(0, now_ms - age_ms))) then is_overdue = 1 end
  -- The last entry stays: it shows the next take-over that the stream is there. A stream without a group is kept for
  -- the group to come, and one whose last entry is no message of a relay is none of ours.
  if less(last[1], cut) then cut = last[1] end
  for _, group in pairs(groups) do
    if less(group.given, cut) then cut = group.given end
    if group.oldest and less(group.oldest, cut) then cut = group.oldest end
  end
  local is_ours = last[2][1] == 'id' and last[2][3] == 'message_key'
  if count > 0 and is_ours and less(first[1], cut) then
    -- Whole nodes go cheaply, in steps of a bounded size; the rest of a node that is partly old goes when it is the first.
    trimmed = redis.call('XTRIM', KEYS[1], 'MINID', '~', cut, 'LIMIT', ARGV[3])
    if trimmed > 0 then
      more = 1
    else
      trimmed = redis.call('XTRIM', KEYS[1], 'MINID', '=', cut)
    end
    redis.call('HSET', KEYS[2], KEYS[1], cut)
  end
end

local reply = {tostring(trimmed), tostring(more), tostring(count), tostring(is_overdue), last[1]}
for at = 4, #ARGV do
  local group = groups[ARGV[at]]
  local oldest = 'absent'
  if group then
    oldest = group.oldest
    if not oldest and less(group.given, last[1]) then
      local next_one = redis.call('XRANGE', KEYS[1], '(' .. group.given, '+', 'COUNT', 1)[1]
      oldest = next_one and next_one[1]
    end
  end
  reply[#reply + 1] = oldest or ''
end
return reply
