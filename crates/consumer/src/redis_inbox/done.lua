-- KEYS[1] the message's key, KEYS[2] its attempts, KEYS[3] its stream; ARGV[1] retention in milliseconds, ARGV[2] group,
-- ARGV[3] entry. The key and the acknowledgement are one step.
redis.call('SET', KEYS[1], 'done', 'PX', ARGV[1])
redis.call('DEL', KEYS[2])
return redis.call('XACK', KEYS[3], ARGV[2], ARGV[3])
