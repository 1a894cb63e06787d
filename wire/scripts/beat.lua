#!lua flags=allow-oom
-- A process says that it lives. Passes when Redis is full: silence would be taken for death.
-- KEYS: process, roster. ARGV: name, incarnation, TTL in ms, 1 to renew only, field, value, …
-- Error: FENCED if a renewal finds another incarnation under the name.
local process, roster, name, incarnation = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local listed = redis.call('HGET', roster, name)
if ARGV[4] == '1' and listed and listed ~= incarnation then
  return redis.error_reply('FENCED ' .. name .. ' is now incarnation ' .. listed)
end
if listed ~= incarnation then redis.call('DEL', process) end
redis.call('HSET', process, 'incarnation', incarnation, unpack(ARGV, 5))
redis.call('PEXPIRE', process, ARGV[3])
redis.call('HSET', roster, name, incarnation)
return 'OK'
