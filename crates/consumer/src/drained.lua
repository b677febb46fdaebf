-- KEYS[1] stream; ARGV[1] group, ARGV[2] the last entry that matters, or '+'.
-- Returns 1 if the group has settled every entry up to it.
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then
  return 1
end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #info, 2 do
    group[info[i]] = info[i + 1]
  end
  if group['name'] == ARGV[1] then
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', ARGV[2], 1)
    local unread = redis.call('XRANGE', KEYS[1], '(' .. group['last-delivered-id'], ARGV[2], 'COUNT', 1)
    return (#pending == 0 and #unread == 0) and 1 or 0
  end
end
return redis.call('XLEN', KEYS[1]) == 0 and 1 or 0
