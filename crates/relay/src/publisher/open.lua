#!lua
-- Opens a page: notes how many entries each of its streams has, so that the end of the transaction can tell what it
-- added.
--
-- KEYS: the note, then the streams of the page. ARGV: leadership and page.

local lengths = {}
for index = 2, #KEYS do
  local length = redis.pcall('XLEN', KEYS[index])
  lengths[index - 1] = type(length) == 'number' and length or '-'
end
redis.call('HSET', KEYS[1], 'of', ARGV[1] .. ' ' .. ARGV[2], 'lengths', table.concat(lengths, ' '))
