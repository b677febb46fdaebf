-- KEYS[1] the message's key, KEYS[2] its attempts, KEYS[3] its stream, KEYS[4] the group's dead letters; ARGV[1] group,
-- ARGV[2] entry, then the fields of the dead letter. When its reply is lost it runs again, and the letter stands twice.
redis.call('XADD', KEYS[4], '*', unpack(ARGV, 3))
redis.call('XACK', KEYS[3], ARGV[1], ARGV[2])
return redis.call('DEL', KEYS[1], KEYS[2])
