-- What a leader writes beside its commits: mirrors for people, times to live, counts of its starts.
-- KEYS: epoch, the last such write, and every key that the commands name.
-- ARGV: epoch, number of this write, msgpack of {{word, …}, …}
-- Error: FENCED if another epoch leads. A write that arrives behind a later one does nothing.
-- A command that is refused leaves the others alone. Without flags, as it is, this script may run in
-- a full Redis, and of its commands those that free memory.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('FENCED another epoch leads')
end
local epoch, number = (redis.call('GET', KEYS[2]) or ''):match('^(%d+)-(%d+)$')
if epoch == ARGV[1] and tonumber(number) >= tonumber(ARGV[2]) then return 'LATE' end
redis.pcall('SET', KEYS[2], ARGV[1] .. '-' .. ARGV[2])
for _, words in ipairs(cmsgpack.unpack(ARGV[3])) do redis.pcall(unpack(words)) end
return 'OK'
