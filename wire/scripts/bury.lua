#!lua flags=allow-oom
-- Moves an entry that nobody can use to `dead`, once.
-- KEYS: stream, dead. ARGV: entry id, number of dead entries to keep, reason, body
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*',
  'stream', KEYS[1], 'entry', ARGV[1], 'reason', ARGV[3], 'body', ARGV[4])
return 1
