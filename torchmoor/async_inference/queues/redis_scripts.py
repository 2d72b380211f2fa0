"""Lua scripts of the Redis queue: one per operation, so that each operation is atomic.

A script runs after PRELUDE. All keys begin with KEYS[1], a hash tag, and so lie on one node of a cluster:
    request:ID       hash: request (JSON), body, endpoint, state, seq, size, attempts, token, wake_at, set_at, span_s,
                     updated_at, expires_at, reason, instance, outcome (JSON), output (its body), invocation,
                     nonce, caller
    invocation:KEY   inference id of a client's call
    seq              counts arrivals
    EP:in:STATE      sorted set by seq: requests of an endpoint in a state
    EP:takeable      by seq: WAITING or RUNNING, and claimable
    EP:expiring      by expiry: the same requests
    EP:decided       by seq: DECIDED, and claimable
    EP:sleeping      by wake_at: under a lease or a retry's delay
    EP:slept         by set_at: the same requests; shows when the clock went back
    EP:bytes         size of the pending inline bodies
    caller:NAME      hash: requests, bytes; a caller's pending requests and the size of their inline bodies
    reserved         by name: locations of requests that have not ended
    ended            by time: all ended requests of all endpoints
ARGV[1] is the time in epoch seconds; "" means the server's clock. A changed layout needs another prefix.
"""

from __future__ import annotations

# Numbers are formatted with all their digits: tostring would round a time to 14.
PRELUDE = """
local P = KEYS[1]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local function text(number) return string.format('%.6f', number) end
local function of(id) return P .. 'request:' .. id end
local function fields(id, ...) return redis.call('HMGET', of(id), ...) end
local function record(id)
  return fields(id, 'seq', 'request', 'state', 'attempts', 'wake_at', 'updated_at', 'reason', 'instance', 'outcome')
end
local function set(id, ...) redis.call('HSET', of(id), 'updated_at', text(now), ...) end

local function move(id, endpoint, seq, from, to)
  if from == to then return end
  if from then redis.call('ZREM', endpoint .. 'in:' .. from, id) end
  if to then redis.call('ZADD', endpoint .. 'in:' .. to, seq, id) end
end
local function untake(id, endpoint)
  for _, name in ipairs({'takeable', 'expiring', 'decided', 'sleeping', 'slept'}) do
    redis.call('ZREM', endpoint .. name, id)
  end
end
local function offer(id, endpoint)  -- it can be claimed
  untake(id, endpoint)
  local state, seq, expires_at = unpack(fields(id, 'state', 'seq', 'expires_at'))
  redis.call('HDEL', of(id), 'wake_at')
  if state == 'DECIDED' then
    redis.call('ZADD', endpoint .. 'decided', seq, id)
  else
    redis.call('ZADD', endpoint .. 'takeable', seq, id)
    redis.call('ZADD', endpoint .. 'expiring', expires_at, id)
  end
end
local function sleep(id, endpoint, span_s)  -- it cannot be claimed for span_s
  untake(id, endpoint)
  local wake_at = text(now + span_s)
  redis.call('HSET', of(id), 'wake_at', wake_at, 'set_at', text(now), 'span_s', text(span_s))
  redis.call('ZADD', endpoint .. 'sleeping', wake_at, id)
  redis.call('ZADD', endpoint .. 'slept', text(now), id)
end
local function settle(id, endpoint, outcome, reason, body)  -- fix its outcome
  local seq, state = unpack(fields(id, 'seq', 'state'))
  move(id, endpoint, seq, state, 'DECIDED')
  set(id, 'state', 'DECIDED', 'outcome', outcome, 'reason', reason)
  if body ~= '' then redis.call('HSET', of(id), 'output', string.sub(body, 2)) end
end
local function held(id, token)  -- its endpoint's prefix and state, if the token holds it
  local endpoint, state, holder = unpack(fields(id, 'endpoint', 'state', 'token'))
  if not holder or holder ~= token then return nil end
  return P .. endpoint .. ':', state
end
"""

# endpoint, inference id, invocation key, request, time to live, body (after a byte, "" for none), max_pending,
# max_pending_bytes, nonce: identifies the client library's second try after a lost answer, whether a new request is
# refused, its locations, its caller ("": not counted), the caller's most requests and bytes.
# The request's JSON ends with `"received_at":`; the script appends the time.
SUBMIT = """
local name, id, invocation, request, ttl_s, body = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local endpoint = P .. name .. ':'
if invocation ~= '' then
  local first = redis.call('GET', P .. 'invocation:' .. invocation)
  if first then
    local found = fields(first, 'request', 'body')
    return {'stored', found[1], found[2]}
  end
end
local nonce, stored = unpack(fields(id, 'nonce', 'request'))
if nonce == ARGV[10] then return {'stored', stored, fields(id, 'body')[1]} end
if nonce then return {'in use'} end
local reserved = P .. 'reserved'
local function is_reserved(location)  -- it, one above it or one below it
  if redis.call('ZSCORE', reserved, location) then return true end
  for at in string.gmatch(location, '()/') do
    if redis.call('ZSCORE', reserved, string.sub(location, 1, at - 1)) then return true end
  end
  return #redis.call('ZRANGEBYLEX', reserved, '(' .. location .. '/', '(' .. location .. '0', 'LIMIT', 0, 1) > 0
end
if ARGV[11] == '1' then return {'refused'} end
if is_reserved(ARGV[12]) or is_reserved(ARGV[13]) then return {'taken'} end
local size = math.max(0, #body - 1)
local caller, share = ARGV[14], P .. 'caller:' .. ARGV[14]
if caller ~= '' then
  local held = redis.call('HMGET', share, 'requests', 'bytes')
  local num_requests, num_bytes = tonumber(held[1] or '0'), tonumber(held[2] or '0')
  if num_requests >= tonumber(ARGV[15]) or num_bytes + size > tonumber(ARGV[16]) then
    return {'limited', num_requests, num_bytes}
  end
end
local pending = 0
for _, state in ipairs({'WAITING', 'RUNNING', 'DECIDED'}) do
  pending = pending + redis.call('ZCARD', endpoint .. 'in:' .. state)
end
if pending >= tonumber(ARGV[8]) then return {'full', 'max_pending'} end
if tonumber(redis.call('GET', endpoint .. 'bytes') or '0') + size > tonumber(ARGV[9]) then
  return {'full', 'max_pending_bytes'}
end
request = request .. text(now) .. '}'
local seq = redis.call('INCR', P .. 'seq')
set(id, 'endpoint', name, 'request', request, 'state', 'WAITING', 'seq', seq, 'size', size, 'attempts', 0,
    'expires_at', text(now + ttl_s), 'invocation', invocation, 'nonce', ARGV[10], 'caller', caller)
if caller ~= '' then
  redis.call('HINCRBY', share, 'requests', 1)
  redis.call('HINCRBY', share, 'bytes', size)
end
if size > 0 then redis.call('HSET', of(id), 'body', string.sub(body, 2)) end
if invocation ~= '' then redis.call('SET', P .. 'invocation:' .. invocation, id) end
redis.call('INCRBY', endpoint .. 'bytes', size)
redis.call('ZADD', reserved, 0, ARGV[12], 0, ARGV[13])
move(id, endpoint, seq, nil, 'WAITING')
offer(id, endpoint)
return {'new', text(now)}
"""

# endpoint, lease, token, whether an attempt may begin, outcome and reason of expiry, most to wake, clock tolerance.
CLAIM = """
local endpoint, lease_s, token, most = P .. ARGV[2] .. ':', tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[8])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', endpoint .. 'slept', '(' .. text(now + ARGV[9]), '+inf',
                               'LIMIT', 0, most)) do
  sleep(id, endpoint, tonumber(fields(id, 'span_s')[1]))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', endpoint .. 'sleeping', '-inf', text(now), 'LIMIT', 0, most)) do
  offer(id, endpoint)
end
local id = redis.call('ZRANGE', endpoint .. 'decided', 0, 0)[1]
if not id then
  id = redis.call('ZRANGEBYSCORE', endpoint .. 'expiring', '-inf', text(now), 'LIMIT', 0, 1)[1]
  if id then settle(id, endpoint, ARGV[6], ARGV[7], '') end
end
if not id and ARGV[5] == '1' then
  id = redis.call('ZRANGE', endpoint .. 'takeable', 0, 0)[1]
  if id then
    local seq, state = unpack(fields(id, 'seq', 'state'))
    move(id, endpoint, seq, state, 'RUNNING')
    set(id, 'state', 'RUNNING')
    redis.call('HINCRBY', of(id), 'attempts', 1)
  end
end
if not id then return false end
set(id, 'token', token)
sleep(id, endpoint, lease_s)
return fields(id, 'request', 'body', 'attempts', 'outcome', 'output')
"""

# inference id, token, lease, instance.
EXTEND = """
local endpoint, state = held(ARGV[2], ARGV[3])
if state ~= 'RUNNING' and state ~= 'DECIDED' then return 0 end
sleep(ARGV[2], endpoint, tonumber(ARGV[4]))
if ARGV[5] ~= '' then redis.call('HSET', of(ARGV[2]), 'instance', ARGV[5]) end
return 1
"""

# inference id, token, outcome, reason, body (after a byte, "" for none).
DECIDE = """
local id, body = ARGV[2], ARGV[6]
local endpoint, state = held(id, ARGV[3])
if state == 'DECIDED' then
  local outcome, output = unpack(fields(id, 'outcome', 'output'))
  return outcome == ARGV[4] and (output and '=' .. output or '') == body and 1 or 0
end
if state ~= 'RUNNING' then return 0 end
settle(id, endpoint, ARGV[4], ARGV[5], body)
sleep(id, endpoint, tonumber(fields(id, 'span_s')[1]))
return 1
"""

# inference id, token, outcome, reason.
REPLACE = """
local id = ARGV[2]
local _, state = held(id, ARGV[3])
if state ~= 'DECIDED' then return 0 end
set(id, 'outcome', ARGV[4], 'reason', ARGV[5])
redis.call('HDEL', of(id), 'output')
return 1
"""

# inference id, token.
FINISH = """
local id = ARGV[2]
local endpoint, state = held(id, ARGV[3])
if not endpoint then return 'lost' end
if state == 'WAITING' or state == 'RUNNING' then return 'undecided' end
if state ~= 'DECIDED' then return 'finished' end
local seq, size, outcome, request, caller = unpack(fields(id, 'seq', 'size', 'outcome', 'request', 'caller'))
local ends, asked = cjson.decode(outcome), cjson.decode(request)
redis.call('ZREM', P .. 'reserved', asked['output_location'], asked['failure_location'])
untake(id, endpoint)
move(id, endpoint, seq, state, ends['state'])
set(id, 'state', ends['state'], 'reason', ends['reason'])
redis.call('HDEL', of(id), 'body', 'output', 'wake_at')
redis.call('DECRBY', endpoint .. 'bytes', size)
if caller and caller ~= '' then
  local share = P .. 'caller:' .. caller
  redis.call('HINCRBY', share, 'bytes', -tonumber(size))
  if redis.call('HINCRBY', share, 'requests', -1) <= 0 then redis.call('DEL', share) end
end
redis.call('ZADD', P .. 'ended', text(now), id)
return 'finished'
"""

# inference id, token, delay, reason, what to add to the attempts of an undecided request.
RETRY = """
local id, delay_s = ARGV[2], tonumber(ARGV[4])
local endpoint, state = held(id, ARGV[3])
if state ~= 'RUNNING' and state ~= 'DECIDED' then return 0 end
if state == 'RUNNING' then
  move(id, endpoint, fields(id, 'seq')[1], 'RUNNING', 'WAITING')
  set(id, 'state', 'WAITING')
  redis.call('HINCRBY', of(id), 'attempts', ARGV[6])
end
set(id, 'reason', ARGV[5])
redis.call('HDEL', of(id), 'token')
if delay_s > 0 then sleep(id, endpoint, delay_s) else offer(id, endpoint) end
return 1
"""

# inference id, outcome, reason.
CANCEL = """
local id = ARGV[2]
local endpoint, state, outcome = unpack(fields(id, 'endpoint', 'state', 'outcome'))
if not state then return false end
if outcome then return {state, outcome} end
endpoint = P .. endpoint .. ':'
settle(id, endpoint, ARGV[3], ARGV[4], '')
redis.call('HDEL', of(id), 'token')
offer(id, endpoint)
return {'DECIDED', ARGV[3]}
"""

# inference id.
GET = "return record(ARGV[2])"

# endpoint, after, limit, whether the newest come first, states.
LIST = """
local endpoint, limit, found = P .. ARGV[2] .. ':', tonumber(ARGV[4]), {}
local after = ARGV[3] ~= '' and fields(ARGV[3], 'seq')[1]
local newest_first = ARGV[5] == '1'
for i = 6, #ARGV do
  local key, ids = endpoint .. 'in:' .. ARGV[i]
  if newest_first then
    ids = redis.call('ZREVRANGEBYSCORE', key, after and '(' .. after or '+inf', '-inf', 'WITHSCORES', 'LIMIT', 0, limit)
  else
    ids = redis.call('ZRANGEBYSCORE', key, after and '(' .. after or '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  end
  for j = 1, #ids, 2 do found[#found + 1] = {ids[j], tonumber(ids[j + 1])} end
end
table.sort(found, function(a, b) return newest_first and a[2] > b[2] or not newest_first and a[2] < b[2] end)
local records = {}
for i = 1, math.min(limit, #found) do records[i] = record(found[i][1]) end
return records
"""

# endpoint.
BACKLOG = """
local endpoint, heads = P .. ARGV[2] .. ':', {}
for _, state in ipairs({'WAITING', 'RUNNING'}) do
  local id = redis.call('ZRANGE', endpoint .. 'in:' .. state, 0, 0)[1]
  if id then heads[#heads + 1] = fields(id, 'request')[1] end
end
return {text(now), redis.call('ZCARD', endpoint .. 'in:WAITING'), redis.call('ZCARD', endpoint .. 'in:RUNNING'),
        redis.call('ZCARD', endpoint .. 'in:DECIDED'), heads}
"""

# remember_s, max_remembered, most to drop now.
FORGET = """
local most = tonumber(ARGV[4])
local old = redis.call('ZRANGEBYSCORE', P .. 'ended', '-inf', '(' .. text(now - ARGV[2]), 'LIMIT', 0, most)
local excess = math.min(most, redis.call('ZCARD', P .. 'ended') - tonumber(ARGV[3]))
if excess > #old then old = redis.call('ZRANGE', P .. 'ended', 0, excess - 1) end
for _, id in ipairs(old) do
  local endpoint, state, invocation = unpack(fields(id, 'endpoint', 'state', 'invocation'))
  redis.call('ZREM', P .. 'ended', id)
  redis.call('ZREM', P .. endpoint .. ':in:' .. state, id)
  if invocation ~= '' then redis.call('DEL', P .. 'invocation:' .. invocation) end
  redis.call('UNLINK', of(id))
end
return #old
"""
