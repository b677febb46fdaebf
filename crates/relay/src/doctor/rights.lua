#!lua flags=no-writes
-- ARGV: for each call the number of its words, and those. Returns the numbers of the calls that the caller may not make.
-- ACL DRYRUN would tell the same, but is itself a right that a relay should not have.
local refused, at, call = {}, 1, 0
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  call = call + 1
  if not redis.acl_check_cmd(unpack(ARGV, at + 1, at + words)) then
    refused[#refused + 1] = call
  end
  at = at + words + 1
end
return refused
