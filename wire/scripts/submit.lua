-- Admission: all of these requests enter the queue, or none does.
-- KEYS: requests, stats, idem:<tenant>:<digest> of the client's key, then req:<id> of each request
-- ARGV: limit, claim, claim that it may take the place of, then for each request its id, its body
-- and as msgpack further fields of req:<id>. The claim is what to store under the client's key;
-- empty, if it gave none.
-- Returns {"OK", entry id, …}, {"FULL", number that wait} or {"CLAIMED", another's claim}.
-- Harmless to repeat: a request that is known keeps its entry, also when Redis is full by now (so
-- no "#!lua" line, with which Redis would not even start the script). One that was aborted before
-- it came stays out, and has the entry id "0-0".
local requests, stats, limit, claim = KEYS[1], KEYS[2], tonumber(ARGV[1]), ARGV[2]
if claim ~= '' then
  local holder = redis.call('GET', KEYS[3])
  if holder and holder ~= claim and holder ~= ARGV[3] then return {'CLAIMED', holder} end
end
local entries, num_new = {}, 0
for i = 4, #KEYS do
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
for i = 4, #KEYS do
  local at = 3 * (i - 4) + 4
  local id, body, fields = unpack(ARGV, at, at + 2)
  if not entries[i] then
    entries[i] = redis.call('XADD', requests, '*', 'kind', 'add', 'id', id, 'body', body)
    redis.call('HSET', KEYS[i], 'entry', entries[i], 'status', 'waiting',
      unpack(cmsgpack.unpack(fields)))
    if i == 4 and claim ~= '' then redis.call('SET', KEYS[3], claim) end
  end
  reply[#reply + 1] = entries[i]
end
return reply
