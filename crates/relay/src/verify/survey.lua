#!lua flags=no-writes
-- Reads entries of a stream without their payloads, and how far a group has got with them, in one atomic step.
--
-- KEYS: the stream. ARGV: first entry, last entry, entries at the most, the group or ''.
-- Returns the last entry that the group was given ('' where there is no such group), and for each entry: its
-- entry id, id, message key, ordering key (tagged; a long one as its hash), 1 if it is pending, and 1 if a replay added it.

local STEP = 10               -- entries looked at in one go: a payload has up to 8 MiB
local BYTES_MAX = 4194304     -- payload after which a call ends
local MESSAGE_KEY_MAX = 512   -- no message has a longer key
local PENDING_MAX = 1000      -- of one call

local given = ''
if ARGV[4] ~= '' then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local name, last
    for at = 1, #group, 2 do
      if group[at] == 'name' then name = group[at + 1] end
      if group[at] == 'last-delivered-id' then last = group[at + 1] end
    end
    if name == ARGV[4] then given = last end
  end
end

local found = {}
local start, left, bytes = ARGV[1], tonumber(ARGV[3]), 0
while left > 0 and bytes < BYTES_MAX do
  local count = math.min(STEP, left)
  local entries = redis.call('XRANGE', KEYS[1], start, ARGV[2], 'COUNT', count)
  for _, entry in ipairs(entries) do
    local seen = {}
    local fields = entry[2]
    for at = 1, #fields, 2 do
      if seen[fields[at]] == nil then seen[fields[at]] = fields[at + 1] end
      bytes = bytes + #fields[at + 1]
    end
    local id, key, ordering = seen['id'] or '', seen['message_key'] or '', seen['ordering_key']
    if #id > 20 then id = '' end
    if #key > MESSAGE_KEY_MAX then key = '' end
    if ordering == nil then
      ordering = ''
    elseif #ordering <= 40 then
      ordering = '=' .. ordering
    else
      ordering = '#' .. redis.sha1hex(ordering)
    end
    found[#found + 1] = {entry[1], id, key, ordering, 0, seen['replay'] and 1 or 0}
  end
  if #entries < count then break end
  start = '(' .. entries[count][1]
  left = left - count
end

if given ~= '' and #found > 0 then
  -- Entries that were deleted are listed as well, so there may be more than those found.
  local pending, from = {}, found[1][1]
  repeat
    local listed = redis.call('XPENDING', KEYS[1], ARGV[4], from, found[#found][1], PENDING_MAX)
    for _, of in ipairs(listed) do
      pending[of[1]] = true
      from = '(' .. of[1]
    end
  until #listed < PENDING_MAX
  for _, entry in ipairs(found) do
    if pending[entry[1]] then entry[5] = 1 end
  end
end
return {given, found}
