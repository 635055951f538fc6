#!/bin/sh
# Makes ROOT: Debian's Python for 64-bit Arm, the packages of requirements/base.txt, and ROOT/python, which runs them under qemu.
#
#     bench/reproduce/arm_root.sh ROOT
#
# Needs 5 GB (PyTorch for Arm comes with CUDA), pip, on Debian 12 the packages of requirements/debian.txt (`make servers`), and as root
# `dpkg --add-architecture arm64 && apt-get update`. The kernels are compiled by Debian's cross compiler, outside the emulator.
set -eu
repository=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1/debian" "$1/compilers" "$1/proc" "$1/sys"
root=$(cd "$1" && pwd)

cd "$root/debian"
for package in python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3 libffi8 \
    libsqlite3-0 liblzma5 libbz2-1.0 libcrypt1 libuuid1; do
    apt-get download -qq "$package:arm64"
done
for file in *.deb; do dpkg -x "$file" "$root"; done

# pip takes the tag of a platform literally: each glibc that a wheel may be built for is named.
platforms=$(for glibc in $(seq 17 28); do echo "--platform manylinux_2_${glibc}_aarch64"; done)
# shellcheck disable=SC2086
python3 -m pip install -q --target "$root/site" --only-binary=:all: --python-version 3.11 --platform manylinux2014_aarch64 $platforms \
    -r "$repository/requirements/base.txt"
mkdir -p "$root/usr/lib/python3/dist-packages"
echo "$root/site" > "$root/usr/lib/python3/dist-packages/site.pth"

# qemu reads a file of ROOT before the host's of the same path. PyTorch ends if it finds the host's processor.
for core in 0 1; do
    folder=$root/sys/devices/system/cpu/cpu$core/regs/identification
    mkdir -p "$folder"
    echo 0x00000000413fd0c1 > "$folder/midr_el1"
    printf 'processor\t: %s\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\n' $core
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
done > "$root/proc/cpuinfo"

for name in cc gcc; do ln -sf "$(command -v aarch64-linux-gnu-gcc)" "$root/compilers/$name"; done
ln -sf "$(command -v aarch64-linux-gnu-g++)" "$root/compilers/g++"
cat > "$root/python" <<EOF
#!/bin/sh
export PYTHONHOME='$root/usr' PATH='$root/compilers':"\$PATH"
exec qemu-aarch64-static -0 '$root/python' -L '$root' '$root/usr/bin/python3.11' "\$@"
EOF
chmod +x "$root/python"
"$root/python" -c 'import platform, torch; print(platform.machine(), torch.__version__, torch.ones(1).item())'
