#!lua flags=allow-oom
-- A wish about a request that was admitted before. Passes when Redis is full: whoever asks already
-- waits for an answer.
-- KEYS: requests, and for a request that comes again req:<id>, idem:<tenant>:<digest>
-- ARGV: kind, request id, body, and for a request that comes again as msgpack the fields of
-- req:<id>, and its claim or nothing: what Redis may have lost
if KEYS[2] then
  redis.call('HSET', KEYS[2], unpack(cmsgpack.unpack(ARGV[4])))
  if ARGV[5] ~= '' then redis.call('SET', KEYS[3], ARGV[5], 'NX') end
end
return redis.call('XADD', KEYS[1], '*', 'kind', ARGV[1], 'id', ARGV[2], 'body', ARGV[3])
