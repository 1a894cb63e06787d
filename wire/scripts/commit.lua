#!lua flags=allow-oom
-- The commit point: tokens exist once this has run. All of it, or nothing.
-- KEYS: epoch, log, requests, stats, tenants, config
-- ARGV: epoch, number of the commit (dense, from 1 in each epoch), body for the log, msgpack of
--   {trim    = 1 to drop the log before this entry,
--    updates = {{req key, {field, value, …}}, …},
--    tokens  = {{tok key, byte offset, bytes}, …}   from offset 0 on, in place of what was there,
--    ended   = {{req key, entry id}, …},
--    entries = {entry id, …}      further entries of `requests` that are done with,
--    outs    = {{out key, body}, …},
--    stats   = {field, value, …},
--    served  = {tenant, tokens, …}, config = {setting, value, …},
--    retention = ms, out_length = entries}
-- Returns "OK", or "DONE" if this very commit was applied before.
-- Errors: FENCED if another epoch leads or has committed, GAP if an earlier commit is missing. Both
-- before any write. An output stream lives as long as an ended request, unless its gateway gets more.
local epoch, n = ARGV[1], tonumber(ARGV[2])
if redis.call('GET', KEYS[1]) ~= epoch then
  return redis.error_reply('FENCED another epoch leads')
end
local id, last = epoch .. '-' .. ARGV[2], '0-0'
if redis.call('EXISTS', KEYS[2]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
end
if last == id then return 'DONE' end
local last_epoch, last_n = last:match('^(%d+)-(%d+)$')
if last_epoch ~= epoch then
  if tonumber(last_epoch) > tonumber(epoch) then
    return redis.error_reply('FENCED a later epoch has committed')
  end
  last_n = 0
end
if tonumber(last_n) ~= n - 1 then
  return redis.error_reply('GAP expected commit ' .. (tonumber(last_n) + 1) .. ', got ' .. n)
end
local part = cmsgpack.unpack(ARGV[4])

-- What is known of a request that ended is kept for a while: its hash, its tokens, and the client's
-- key that led to it. The choices of one answer that a client may come back for are kept together,
-- until all of them have ended and a while longer.
local function keep_for_a_while(req_key)
  local prefix, id = req_key:match('^(.*:)req:(.*)$')
  local first = redis.pcall('HGET', req_key, 'first')
  local ids = {id}
  if type(first) == 'string' then
    local siblings = redis.pcall('HGET', prefix .. 'req:' .. first, 'siblings')
    for sibling in (type(siblings) == 'string' and siblings or ''):gmatch('%S+') do
      local status = redis.pcall('HGET', prefix .. 'req:' .. sibling, 'status')
      if type(status) == 'string' and status ~= 'finished' then return end
      ids[#ids + 1] = sibling
    end
    id = first
  end
  local idem = redis.pcall('HGET', prefix .. 'req:' .. id, 'idem')
  if type(idem) == 'string' then redis.pcall('PEXPIRE', idem, part.retention) end
  for _, one in ipairs(ids) do
    redis.pcall('PEXPIRE', prefix .. 'req:' .. one, part.retention)
    redis.pcall('PEXPIRE', prefix .. 'tok:' .. one, part.retention)
  end
end

-- A request that has ended counts towards its tenant's tokens of this minute for what it was, and no
-- longer for what it might have become (see submit.lua).
local function settle(req_key)
  local known = redis.pcall('HMGET', req_key,
    'reserved_tokens', 'num_prompt_tokens', 'num_output_tokens', 'tenant')
  if known.err or not known[1] then return end
  redis.pcall('HDEL', req_key, 'reserved_tokens')
  local bucket = req_key:match('^(.*:)req:') .. 'quota:' .. (known[4] or '')
  local unused = known[1] - (known[2] or 0) - (known[3] or 0)
  if redis.pcall('HEXISTS', bucket, 'tokens') == 1 then
    redis.pcall('HINCRBYFLOAT', bucket, 'tokens', unused)
  end
end

if part.trim == 1 then redis.pcall('XTRIM', KEYS[2], 'MINID', id) end
redis.call('XADD', KEYS[2], id, 'tokens', part.num_tokens, 'body', ARGV[3])
for _, one in ipairs(part.updates) do redis.pcall('HSET', one[1], unpack(one[2])) end
for _, one in ipairs(part.tokens) do
  if one[2] == 0 then redis.pcall('SET', one[1], one[3])
  else redis.pcall('SETRANGE', one[1], one[2], one[3]) end
end
for _, one in ipairs(part.ended) do
  redis.pcall('XDEL', KEYS[3], one[2])
  settle(one[1])
  keep_for_a_while(one[1])
end
for _, entry in ipairs(part.entries) do redis.pcall('XDEL', KEYS[3], entry) end
for _, one in ipairs(part.outs) do
  redis.pcall('XADD', one[1], 'MAXLEN', '~', part.out_length, id, 'body', one[2])
  redis.pcall('PEXPIRE', one[1], part.retention)
end
if #part.stats > 0 then redis.pcall('HSET', KEYS[4], unpack(part.stats)) end
if #part.served > 0 then redis.pcall('HSET', KEYS[5], unpack(part.served)) end
if #part.config > 0 then redis.pcall('HSET', KEYS[6], unpack(part.config)) end
return 'OK'
