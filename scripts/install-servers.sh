#!/bin/sh
# Finds Postgres and Redis, with --for-tests also PgBouncer and a Python with psycopg2 and redis, and installs what is
# missing: Debian packages or Homebrew formulas.
#
# It stops, starts and configures no service. What it finds is used only through private servers in a temporary
# directory, so nothing that runs on this machine is touched. Debian starts a freshly installed server as a service,
# as it always does; nothing here uses that one either.
set -eu

POSTGRES_MAJOR_MIN=14
REDIS_MAJOR_MIN=7

# Where the servers are looked for is the same as in crates/testkit/src/binaries.rs.
complete() {
    for tool in initdb postgres pg_basebackup pg_resetwal; do
        [ -x "$1/$tool" ] || return 1
    done
}

postgres_dir() {
    if [ -n "${OUTBOX_POSTGRES_BIN_DIR:-}" ]; then
        echo "$OUTBOX_POSTGRES_BIN_DIR"
        return
    fi
    old_ifs=$IFS
    IFS=:
    for dir in $PATH; do
        if complete "$dir"; then
            IFS=$old_ifs
            echo "$dir"
            return
        fi
    done
    IFS=$old_ifs
    for root in /usr/lib/postgresql/ /usr/pgsql- /opt/homebrew/opt/postgresql@ /usr/local/opt/postgresql@; do
        for major in 20 19 18 17 16 15 14; do
            if complete "$root$major/bin"; then
                echo "$root$major/bin"
                return
            fi
        done
    done
    if complete /usr/bin; then
        echo /usr/bin
    fi
}

redis_server() {
    if [ -n "${OUTBOX_REDIS_SERVER:-}" ]; then
        echo "$OUTBOX_REDIS_SERVER"
        return
    fi
    if command -v redis-server; then
        return
    fi
    for dir in /usr/bin /usr/local/bin /usr/sbin /opt/homebrew/bin /opt/homebrew/opt/redis/bin /usr/local/opt/redis/bin; do
        if [ -x "$dir/redis-server" ]; then
            echo "$dir/redis-server"
            return
        fi
    done
}

# It stands where a pooler stands before Postgres, in tests only.
pgbouncer_program() {
    if [ -n "${OUTBOX_PGBOUNCER:-}" ]; then
        echo "$OUTBOX_PGBOUNCER"
        return
    fi
    if command -v pgbouncer; then
        return
    fi
    for dir in /usr/sbin /usr/bin /usr/local/bin /opt/homebrew/bin /usr/local/sbin; do
        if [ -x "$dir/pgbouncer" ]; then
            echo "$dir/pgbouncer"
            return
        fi
    done
}

# Runs the examples of docs/other-languages.md. Where it is looked for is the same as in the test of that document.
python_program() {
    for python in ${OUTBOX_PYTHON:-/usr/bin/python3 python3}; do
        if "$python" -c 'import psycopg2, redis' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

# The first number of "postgres (PostgreSQL) 15.18" or of "Redis server v=7.0.15 sha=...".
postgres_major() { "$(postgres_dir)/postgres" --version | sed -n 's/^[^0-9]*\([0-9]*\).*/\1/p'; }
redis_major() { "$(redis_server)" --version | sed -n 's/.*v=\([0-9]*\).*/\1/p'; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "install-servers: run as root, or install sudo; needed: $*" >&2
        exit 1
    fi
}

install_with_apt() {
    echo "install-servers: installing with apt-get:$1"
    as_root apt-get update -q
    # Unquoted on purpose: a list of packages.
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $1 </dev/null
}

install_with_brew() {
    echo "install-servers: installing with brew:$1"
    # shellcheck disable=SC2086
    brew install $1
}

has_postgres() { [ -n "$(postgres_dir)" ]; }
has_redis() { [ -n "$(redis_server)" ]; }
# True where it is not needed.
has_pgbouncer() { [ "${1:-}" != --for-tests ] || [ -n "$(pgbouncer_program)" ]; }

has_python() { [ "${1:-}" != --for-tests ] || [ -n "$(python_program)" ]; }

missing_debian=""
missing_brew=""
if ! has_postgres; then
    missing_debian="$missing_debian postgresql"
    missing_brew="$missing_brew postgresql@17"
fi
if ! has_redis; then
    missing_debian="$missing_debian redis-server"
    missing_brew="$missing_brew redis"
fi
if ! has_pgbouncer "$@"; then
    missing_debian="$missing_debian pgbouncer"
    missing_brew="$missing_brew pgbouncer"
fi
if ! has_python "$@"; then
    missing_debian="$missing_debian python3 python3-psycopg2 python3-redis"
fi

if [ -n "$missing_debian" ]; then
    if command -v apt-get >/dev/null; then
        install_with_apt "$missing_debian"
    elif command -v brew >/dev/null; then
        if [ -n "$missing_brew" ]; then
            install_with_brew "$missing_brew"
        fi
    else
        echo "install-servers: there is neither apt-get nor brew here." >&2
        echo "Install Postgres $POSTGRES_MAJOR_MIN or later and Redis $REDIS_MAJOR_MIN.0 or later" \
            "and PgBouncer (Fedora: dnf install postgresql-server redis pgbouncer), and run this again." >&2
        exit 1
    fi
fi

if ! has_postgres || ! has_redis || ! has_pgbouncer "$@"; then
    echo "install-servers: the servers were installed and still are not found; name them in" \
        "OUTBOX_POSTGRES_BIN_DIR (a directory), OUTBOX_REDIS_SERVER and OUTBOX_PGBOUNCER (programs)" >&2
    exit 1
fi
if ! has_python "$@"; then
    echo "install-servers: no Python has psycopg2 and redis, which the examples for other languages need; make one" \
        "(python3 -m venv DIR && DIR/bin/pip install psycopg2-binary redis) and name DIR/bin/python in OUTBOX_PYTHON" >&2
    exit 1
fi
postgres=$(postgres_major)
redis=$(redis_major)
if [ "${postgres:-0}" -lt "$POSTGRES_MAJOR_MIN" ]; then
    echo "install-servers: $(postgres_dir) has Postgres ${postgres:-of unknown version};" \
        "$POSTGRES_MAJOR_MIN or later is needed" >&2
    exit 1
fi
if [ "${redis:-0}" -lt "$REDIS_MAJOR_MIN" ]; then
    echo "install-servers: $(redis_server) is Redis ${redis:-of unknown version}; $REDIS_MAJOR_MIN.0 or later is needed" >&2
    exit 1
fi
echo "servers: Postgres $postgres in $(postgres_dir), Redis $redis at $(redis_server)"
if [ "${1:-}" = --for-tests ]; then
    echo "for tests: PgBouncer at $(pgbouncer_program), Python with psycopg2 and redis at $(python_program)"
fi
