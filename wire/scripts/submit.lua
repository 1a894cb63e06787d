-- Admission: all of these requests enter the queue, or none does.
-- KEYS: requests, stats, idem:<tenant>:<digest> of the client's key, quota:<tenant>, then req:<id> of
-- each request
-- ARGV: limit, claim, claim that it may take the place of, requests and tokens that the tenant may ask
-- for in a minute (0: no limit), then for each request its id, its body, as msgpack further fields of
-- req:<id>, and the tokens that it counts for until it ends. The claim is what to store under the
-- client's key; empty, if it gave none.
-- Returns {"OK", entry id, …}, {"FULL", number that wait}, {"CLAIMED", another's claim} or
-- {"QUOTA", "requests" or "tokens", ms until the same would pass}.
-- Harmless to repeat: a request that is known keeps its entry and is not counted again, also when Redis
-- is full by now (so no "#!lua" line, with which Redis would not even start the script). One that was
-- aborted before it came stays out, and has the entry id "0-0".
local requests, stats, limit, claim = KEYS[1], KEYS[2], tonumber(ARGV[1]), ARGV[2]
local FIRST, PARTS = 5, 4  -- of KEYS, a request's first; of ARGV, the parts of each
if claim ~= '' then
  local holder = redis.call('GET', KEYS[3])
  if holder and holder ~= claim and holder ~= ARGV[3] then return {'CLAIMED', holder} end
end
local entries, num_new, num_tokens = {}, 0, 0
for i = FIRST, #KEYS do
  local entry, status = unpack(redis.call('HMGET', KEYS[i], 'entry', 'status'))
  entries[i] = entry or (status and '0-0')
  if not entries[i] then
    num_new = num_new + 1
    num_tokens = num_tokens + tonumber(ARGV[PARTS * (i - FIRST) + 9])
  end
end
if num_new > 0 then
  local num_running = tonumber(redis.call('HGET', stats, 'num_requests_running') or '0')
  local num_waiting = math.max(0, redis.call('XLEN', requests) - num_running)
  if num_waiting + num_new > limit then return {'FULL', num_waiting} end
end

-- Token buckets (Turner, "New directions in communications", 1986): each holds a minute's worth and
-- fills evenly. What counts for more than that waits for a full bucket and leaves it below zero.
local per_minute = {requests = tonumber(ARGV[4]), tokens = tonumber(ARGV[5])}
if num_new > 0 and per_minute.requests + per_minute.tokens > 0 then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local was = redis.call('HMGET', KEYS[4], 'at', 'requests', 'tokens')
  local elapsed = was[1] and math.max(0, now - tonumber(was[1])) or 0
  local levels, full_in = {'at', string.format('%.0f', now)}, 0
  for place, what in ipairs({'requests', 'tokens'}) do
    local size, cost = per_minute[what], what == 'tokens' and num_tokens or num_new
    if size > 0 then
      local level = math.min(size, tonumber(was[place + 1] or size) + elapsed * size / 60000)
      local missing = math.min(size, cost) - level
      if missing > 0 then
        return {'QUOTA', what, string.format('%.0f', math.ceil(missing * 60000 / size))}
      end
      levels[#levels + 1] = what
      levels[#levels + 1] = string.format('%.3f', level - cost)
      full_in = math.max(full_in, math.ceil((size - level + cost) * 60000 / size))
    end
  end
  redis.call('HSET', KEYS[4], unpack(levels))
  redis.call('PEXPIRE', KEYS[4], string.format('%.0f', full_in))
end

local reply = {'OK'}
for i = FIRST, #KEYS do
  local at = PARTS * (i - FIRST) + 6
  local id, body, fields, counts_for = unpack(ARGV, at, at + 3)
  if not entries[i] then
    entries[i] = redis.call('XADD', requests, '*', 'kind', 'add', 'id', id, 'body', body)
    redis.call('HSET', KEYS[i], 'entry', entries[i], 'status', 'waiting',
      unpack(cmsgpack.unpack(fields)))
    if per_minute.tokens > 0 then redis.call('HSET', KEYS[i], 'reserved_tokens', counts_for) end
    if i == FIRST and claim ~= '' then redis.call('SET', KEYS[3], claim) end
  end
  reply[#reply + 1] = entries[i]
end
return reply
