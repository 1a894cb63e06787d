#!lua flags=allow-oom
-- The leader's lease. KEYS: leader, epoch
-- ARGV: owner, lease in ms, epoch held (0 to acquire), lowest epoch allowed
-- Returns {epoch, server time in ms}, or {0, server time in ms} if another leads.
local owner, lease, held, floor = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder = redis.call('GET', KEYS[1])
local epoch = redis.call('GET', KEYS[2]) or '0'
if holder and holder ~= owner then return {'0', string.format('%.0f', now)} end
if held == '0' then
  epoch = string.format('%.0f', math.max(tonumber(epoch) + 1, now, floor))
  redis.call('SET', KEYS[2], epoch)
elseif held ~= epoch then
  return {'0', string.format('%.0f', now)}
end
redis.call('SET', KEYS[1], owner, 'PX', lease)
return {epoch, string.format('%.0f', now)}
