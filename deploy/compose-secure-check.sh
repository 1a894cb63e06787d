#!/usr/bin/env bash
# Run beside `docker compose -f compose.yaml -f compose.secure.yaml up`: only who has a key is
# answered, no account of Redis may do what its role does not, and a rolling restart costs nothing.
# ADMIN_KEY is the key that deploy/make-secrets printed.
set -euo pipefail
export COMPOSE_FILE=compose.yaml:compose.secure.yaml

status() {  # status KEY: of a request for an answer; the answer is left in the file answer
  curl --silent --output answer --write-out '%{http_code}' --max-time 120 \
    ${1:+--header "Authorization: Bearer $1"} --header 'Content-Type: application/json' \
    --data '{"model": "demo", "prompt": "The capital of France is", "max_tokens": 8,
             "temperature": 0}' http://127.0.0.1:8000/v1/completions || true
}

redis() {  # redis ROLE WORD…: a command by the account of a role, as that role's containers have it
  local role=$1
  shift
  docker compose exec -T redis redis-cli --no-auth-warning --user "$role" \
    --pass "$(cat "secrets/redis-$role")" "$@" 2>&1
}

echo '-- keys'
cd "$(dirname "$0")/.."
trap 'rm -f answer' EXIT
[[ $(status '') == 401 ]]
[[ $(status ps-wrong) == 401 ]]
[[ $(status "$ADMIN_KEY") == 200 ]]
grep -q Paris answer

echo '-- accounts of Redis'
[[ $(docker compose exec -T redis redis-cli ping 2>&1) == *NOAUTH* ]]
for role in gateway scheduler worker; do
  [[ $(redis "$role" ping) == PONG ]]
  for command in flushall 'config get dir' 'keys x' 'acl list' shutdown 'set elsewhere 1'; do
    # shellcheck disable=SC2086  # the words of a command
    [[ $(redis "$role" $command) == *NOPERM* ]] || { echo "$role may: $command" >&2; exit 1; }
  done
done

echo '-- containers: no root, nothing to write on, no capabilities'
for service in gateway scheduler gpu-worker; do
  docker compose exec -T "$service" sh -c '
    [ "$(id -u)" != 0 ] && ! touch /opt/pagestream/x 2>/dev/null &&
    grep -q "^CapBnd:.0*$" /proc/self/status && grep -q "^NoNewPrivs:.1" /proc/self/status'
done

echo '-- a rolling restart, while somebody asks'
deploy/rolling-restart --stop 'docker restart --time 40 {host}' \
  --ps 'docker compose exec -T scheduler pagestream ps --json' &
restarting=$!
while kill -0 "$restarting" 2>/dev/null; do
  found=$(status "$ADMIN_KEY")
  # There is one gateway: for a moment nobody listens, and then it has no model yet.
  [[ $found == 200 || $found == 000 || $found == 503 ]] || { echo "answered $found" >&2; exit 1; }
done
wait "$restarting"
[[ $(status "$ADMIN_KEY") == 200 ]]
grep -q Paris answer
