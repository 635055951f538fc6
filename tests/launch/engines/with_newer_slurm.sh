#!/usr/bin/env bash
# Runs a command where Slurm is that of a newer Debian than this machine's, for what the older one does not have (topology/block):
#
#   tests/launch/engines/with_newer_slurm.sh FOLDER .venv/bin/python -m pytest tests/launch/engines/test_slurm_blocks.py
#
# Needs root and apt on a Debian, 40 MB to download and 150 MB of disk. The packages are unpacked into FOLDER and never installed: the command runs in a
# mount namespace of its own whose root they are, with this machine's /proc, /dev, /sys, /tmp, and the top folders of the working directory, of HOME and of Python.
set -euo pipefail
suite=trixie
folder=$(mkdir -p "$1" && cd "$1" && pwd); shift
root=$folder/root
if [ ! -e "$folder/unpacked" ]; then
    mkdir -p "$folder"/{sources,lists/partial,cache/archives/partial,packages} "$root"
    : > "$folder/status"
    printf 'Types: deb\nURIs: http://deb.debian.org/debian\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
        "$suite" > "$folder/sources/$suite.sources"
    options=(-o "Dir::State=$folder" -o "Dir::State::Lists=$folder/lists" -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache"
        -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$folder/sources" -o Dir::Etc::Parts=/dev/null -o APT::Install-Recommends=0)
    apt-get "${options[@]}" -qq update
    wanted=(slurm-wlm munge bash coreutils grep sed findutils mawk hostname passwd base-files libc-bin procps util-linux libpam-modules
        libffi8 libssl3t64 libsqlite3-0 libbz2-1.0 liblzma5 zlib1g libstdc++6 libgomp1 libreadline8t64 libuuid1 libexpat1 debianutils)
    apt-get "${options[@]}" --print-uris --yes install "${wanted[@]}" | sed -n "s/^'\([^']*\)'.*/\1/p" \
        | xargs -P 4 -n 8 wget --quiet --no-clobber --directory-prefix="$folder/packages"
    # base-files first: it makes /bin and /lib links into /usr.
    for package in "$folder"/packages/base-files_*.deb "$folder"/packages/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory "$root"
    done
    # What the packages' own scripts would have done.
    for name in slurmctld slurmd slurmstepd; do ln -sf "$name-wlm" "$root/usr/sbin/$name"; done
    ln -sf mawk "$root/usr/bin/awk"
    printf '%s sufficient pam_permit.so\n' auth account password session | tee "$root/etc/pam.d/runuser" > "$root/etc/pam.d/other"
    : > "$folder/unpacked"
fi
ln -sf bash "$root/usr/bin/sh"  # which sbatch --wrap asks for, and dash would bring
cp /etc/{passwd,group,hosts,nsswitch.conf,resolv.conf} "$root/etc/"
program=$(command -v "$1")
shared=()
for path in /proc /dev /sys /tmp "$PWD" "$HOME" "$(readlink -f "$program")" "$(readlink -f "$(dirname "$program")")"; do
    top=/$(cut -d/ -f2 <<< "$path")
    case " ${shared[*]-} /usr /bin /lib /etc " in *" $top "*) ;; *) shared+=("$top") ;; esac
done
# shellcheck disable=SC2016
exec unshare --mount bash -c '
    root=$1 here=$2; IFS=: read -ra shared <<< "$3"; shift 3
    mount --make-rprivate /
    for path in "${shared[@]}"; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
    exec chroot "$root" /bin/bash -c '\''ldconfig; cd "$1"; shift; exec "$@"'\'' -- "$here" "$@"
' -- "$root" "$PWD" "$(IFS=:; echo "${shared[*]}")" "$@"
