# Ends what the test process left behind, however that process ended.
# $1: the directory with one subdirectory for each server; its file `pid` names the running process.

trap '' INT TERM HUP QUIT

children_of() {
    if [ -r /proc/self/stat ]; then
        for stat in /proc/[0-9]*/stat; do
            read -r child _ _ parent _ 2>/dev/null <"$stat" || continue
            [ "$parent" = "$1" ] && echo "$child"
        done
    else
        ps -A -o pid= -o ppid= | while read -r child parent; do
            [ "$parent" = "$1" ] && echo "$child"
        done
    fi
}

# The test process holds the other end of this pipe and never writes: the read ends when it does.
cat >/dev/null

# From here on the launcher starts nothing more.
: >"$1/ended"

for file in "$1"/*/pid; do
    [ -f "$file" ] || continue
    read -r pid <"$file" || continue
    # Stopped first, so that it makes no new children while they are listed.
    kill -STOP "$pid" 2>/dev/null || continue
    kill -KILL $(children_of "$pid") "$pid" 2>/dev/null
    # A killed Postgres leaves a shared memory segment; its id is in this file.
    lock="${file%/pid}/data/postmaster.pid"
    [ -f "$lock" ] && ipcrm -m "$(sed -n '7s/.* //p' "$lock")" 2>/dev/null
done

# A process that was killed may still be writing its last file for a moment.
for _ in 1 2 3 4 5; do
    rm -rf "$1" 2>/dev/null && break
    sleep 1
done
