#!lua flags=allow-oom
-- A wish about a request that was admitted before. Passes when Redis is full: whoever asks already
-- waits for an answer. KEYS: requests. ARGV: kind, request id, body
return redis.call('XADD', KEYS[1], '*', 'kind', ARGV[1], 'id', ARGV[2], 'body', ARGV[3])
