#!lua flags=allow-oom
-- The leader's lease. KEYS: leader, epoch
-- ARGV: owner, lease in ms (0 gives it up), epoch held (0 to acquire), lowest epoch allowed
-- Returns {epoch, server time in ms}; the epoch is 0 if another leads or nobody does.
-- A new epoch is above all before it: also after Redis lost its data, by the clock and the floor.
local owner, lease, held, floor = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder = redis.call('GET', KEYS[1])
local epoch = redis.call('GET', KEYS[2]) or '0'
local refused = {'0', string.format('%.0f', now)}
if holder and holder ~= owner then return refused end
if lease == '0' then
  redis.call('DEL', KEYS[1])
  return refused
end
if held == '0' then
  epoch = string.format('%.0f', math.max(tonumber(epoch) + 1, now, floor))
  redis.call('SET', KEYS[2], epoch)
elseif held ~= epoch then
  return refused
end
redis.call('SET', KEYS[1], owner, 'PX', lease)
return {epoch, string.format('%.0f', now)}
