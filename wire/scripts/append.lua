#!lua flags=allow-oom
-- Appends an entry under an id of its own. Passes when Redis is full: entries of steps and results
-- are what lets requests end, and the stream is trimmed.
-- KEYS: stream. ARGV: entry id, number of entries to keep, field, value, …
-- Returns "OK", or "DONE" if this entry was appended before.
-- Error: FENCED if the stream has gone past the id without it.
local stream, id = KEYS[1], ARGV[1]
local reply = redis.pcall('XADD', stream, 'MAXLEN', '~', ARGV[2], id, unpack(ARGV, 3))
if not reply.err then return 'OK' end
if not string.find(reply.err, 'equal or smaller', 1, true) then return reply end
if #redis.call('XRANGE', stream, id, id) == 1 then return 'DONE' end
return redis.error_reply('FENCED ' .. id .. ' is below the last entry')
