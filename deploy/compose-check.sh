#!/usr/bin/env bash
# Run beside `docker compose up`: it answers, on more workers and schedulers too, and after a kill.
set -euo pipefail

ask() {  # asks for the capital of France until somebody answers, for two minutes at most
  python3 - <<'PY'
import json, time, urllib.request
body = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "temperature": 0,
}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
for attempt in range(60):
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
        break
    except OSError as error:
        print(f"not yet: {error}")
        time.sleep(2)
else:
    raise SystemExit("nobody answers")
print(answer)
raise SystemExit("Paris" not in answer)
PY
}

count() {  # count ROLE STATE: processes of a role in a state, as Redis knows them
  docker compose exec -T gateway pagestream ps --json | python3 -c '
import json, sys
found = json.load(sys.stdin)["processes"]
print(sum(one["role"] == sys.argv[1] and one["state"] == sys.argv[2] for one in found))' "$1" "$2"
}

wait_for() {  # wait_for ROLE STATE NUMBER
  for _ in $(seq 90); do
    [[ $(count "$1" "$2") == "$3" ]] && return
    sleep 2
  done
  echo "no $3 of $1 in state $2" >&2
  docker compose exec -T gateway pagestream ps >&2
  return 1
}

echo '-- as started'
ask

echo '-- the user and the network'
[[ $(docker compose exec -T gpu-worker id -u) != 0 ]]
[[ $(docker compose port gateway 8000) == 127.0.0.1:8000 ]]

echo '-- two workers, two schedulers'
docker compose up --detach --no-build --no-recreate --scale gpu-worker=2 --scale scheduler=2
wait_for worker ready 2
wait_for scheduler standby 1
ask

echo '-- a worker and the scheduler crash: Docker starts them again'
for service in gpu-worker scheduler; do
  docker compose exec -T "$service" sh -c 'kill -KILL $(cat /proc/1/task/1/children)'
done
ask
wait_for worker ready 2
wait_for scheduler standby 1
ask

echo '-- all but the gateway is killed'
docker compose kill --signal KILL gpu-worker scheduler redis
docker compose up --detach --no-build --no-recreate --scale gpu-worker=2 --scale scheduler=2
wait_for worker ready 2
wait_for scheduler leader 1
ask
