-- Admission: all of these requests enter the queue, or none does.
-- KEYS: requests, stats, then req:<id> of each request
-- ARGV: limit, then for each request its id and its body
-- Returns {"OK", entry id, …} or {"FULL", number that wait}.
-- Harmless to repeat: a request that is known keeps its entry, also when Redis is full by now (so
-- no "#!lua" line, with which Redis would not even start the script). One that was aborted before
-- it came stays out, and has the entry id "0-0".
local requests, stats, limit = KEYS[1], KEYS[2], tonumber(ARGV[1])
local entries, num_new = {}, 0
for i = 3, #KEYS do
  local entry, status = unpack(redis.call('HMGET', KEYS[i], 'entry', 'status'))
  entries[i] = entry or (status and '0-0')
  if not entries[i] then num_new = num_new + 1 end
end
if num_new > 0 then
  local num_running = tonumber(redis.call('HGET', stats, 'num_requests_running') or '0')
  local num_waiting = math.max(0, redis.call('XLEN', requests) - num_running)
  if num_waiting + num_new > limit then return {'FULL', num_waiting} end
end
local reply = {'OK'}
for i = 3, #KEYS do
  local id, body = ARGV[2 * i - 4], ARGV[2 * i - 3]
  if not entries[i] then
    entries[i] = redis.call('XADD', requests, '*', 'kind', 'add', 'id', id, 'body', body)
    redis.call('HSET', KEYS[i], 'entry', entries[i], 'status', 'waiting')
  end
  reply[#reply + 1] = entries[i]
end
return reply
