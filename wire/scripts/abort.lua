#!lua flags=allow-oom
-- The wish that a request ends. Passes when Redis is full, since it makes room.
-- KEYS: requests, req:<id>. ARGV: request id, body, how long a late submission is refused, in ms
-- A request that has not been submitted leaves a mark that `submit` obeys, if it comes after all.
if redis.call('HEXISTS', KEYS[2], 'entry') == 0 then
  redis.call('HSET', KEYS[2], 'status', 'finished', 'finish_reason', 'abort')
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
return redis.call('XADD', KEYS[1], '*', 'kind', 'abort', 'id', ARGV[1], 'body', ARGV[2])
