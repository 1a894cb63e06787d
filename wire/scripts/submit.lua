-- Admission: all of these requests enter the queue, or none does.
-- KEYS: requests, stats, then req:<id> of each request
-- ARGV: limit, retention in ms, then for each request its id and its body
-- Returns {"OK", entry id, …} or {"FULL", number that wait}.
-- Harmless to repeat: a request that is known keeps its entry.
local requests, stats = KEYS[1], KEYS[2]
local limit, retention = tonumber(ARGV[1]), ARGV[2]
local num_new = 0
for i = 3, #KEYS do
  if redis.call('HEXISTS', KEYS[i], 'entry') == 0 then num_new = num_new + 1 end
end
local num_running = tonumber(redis.call('HGET', stats, 'num_requests_running') or '0')
local num_waiting = math.max(0, redis.call('XLEN', requests) - num_running)
if num_new > 0 and num_waiting + num_new > limit then
  return {'FULL', num_waiting}
end
local reply = {'OK'}
for i = 3, #KEYS do
  local id, body = ARGV[2 * i - 3], ARGV[2 * i - 2]
  local entry = redis.call('HGET', KEYS[i], 'entry')
  if not entry then
    entry = redis.call('XADD', requests, '*', 'kind', 'add', 'id', id, 'body', body)
    redis.call('HSET', KEYS[i], 'entry', entry, 'status', 'waiting')
  end
  reply[#reply + 1] = entry
end
return reply
