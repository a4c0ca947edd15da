#!/usr/bin/env bash
# `browser.sh FILE`: make FILE a headless Chromium: the one on the path, or else Debian's, unpacked beside FILE.
set -euo pipefail
root=$(realpath -m "$1.packages/root")
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if found=$(command -v "$name"); then
        ln -sf "$found" "$1"
        exit
    fi
done
"$(dirname "${BASH_SOURCE[0]}")/../unpack" "$1.packages" chromium-headless-shell fonts-dejavu-core || {
    echo "no browser: Debian's package chromium-headless-shell is not to be had here" >&2
    exit 0
}
multiarch=$(uname -m)-linux-gnu
libraries=$(printf "%s:" "$root"/{usr/lib,lib}/"$multiarch" "$root/usr/lib/$multiarch/pulseaudio")
cat >"$root/fonts.conf" <<FONTS
<fontconfig>
  <dir>$root/usr/share/fonts</dir>
  <include ignore_missing="yes">$root/etc/fonts/fonts.conf</include>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
</fontconfig>
FONTS
printf '#!/bin/sh\nLD_LIBRARY_PATH=%q FONTCONFIG_FILE=%q exec %q "$@"\n' \
    "$libraries" "$root/fonts.conf" "$root/usr/lib/chromium/chromium-headless-shell" >"$1"
chmod +x "$1"
