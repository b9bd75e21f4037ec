#!/bin/bash
# Build a Kubernetes control plane from Debian's packages, for tests/kubernetes. Nothing is installed
# on the system, and no root is needed.
#
#   scripts/build_control_plane.sh [FOLDER]      default: ~/.cache/rollway/control-plane
#
# FOLDER gets etcd, kube-apiserver, kube-controller-manager (1.20, bookworm's last whole source) and
# apiextensions-apiserver (1.36, from sid's libraries). It takes about a quarter of an hour on two
# cores and 4 GB of disk, which are freed at the end. Where setup-envtest can be had, it is quicker:
# point KUBEBUILDER_ASSETS to what it downloads.
set -euo pipefail

out=$(realpath -m "${1:-$HOME/.cache/rollway/control-plane}")
if [ -e "$out/READY" ]; then
    echo "The control plane is in $out."
    exit 0
fi
for tool in apt-get dpkg openssl tar; do
    command -v "$tool" > /dev/null || { echo "This needs Debian's $tool." >&2; exit 1; }
done
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
work=$(mktemp -d "$out/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

# An apt of our own: its lists know bookworm and sid, the system's stay as they are.
find_mirror() {
    grep -rhvE '^ *#' /etc/apt/sources.list /etc/apt/sources.list.d 2> /dev/null |
        grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 | tr -d ' ' || true
}
mirror=${DEBIAN_MIRROR:-$(find_mirror)}
if [ -z "$mirror" ]; then
    echo "No mirror of Debian is configured: set DEBIAN_MIRROR." >&2
    exit 1
fi
key=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$work"/apt/state/lists/partial "$work"/apt/cache/archives/partial "$work"/{debs,root,home}
touch "$work/apt/status"
cat > "$work/apt/sources.list" << EOF
deb [signed-by=$key] $mirror bookworm main
deb-src [signed-by=$key] $mirror bookworm main
deb [signed-by=$key] $mirror sid main
EOF
cat > "$work/apt/apt.conf" << EOF
Dir::State "$work/apt/state";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Sandbox::User "root";
EOF
export APT_CONFIG=$work/apt/apt.conf

echo "Downloading 200 MB from $mirror"
apt-get update -qq
cd "$work/debs"
mapfile -t libraries < <(grep -v '^#' "$here/control_plane_packages.txt")
apt-get download -qq "${libraries[@]/%//sid}" {etcd-server,golang-1.27-go,golang-1.27-src}/sid
apt-get download -qq {golang-1.19-go,golang-1.19-src,golang-github-modern-go-reflect2-dev}/bookworm
apt-get source -qq --download-only kubernetes/bookworm
for package in *.deb; do dpkg -x "$package" "$work/root"; done
tree=$work/gopath/src/k8s.io/kubernetes
mkdir -p "$tree"
tar xzf kubernetes_*.orig.tar.gz -C "$tree" --strip-components=1
# The tree's own reflect2 1.0.1 corrupts maps when Go 1.18 or later compiles it.
rm -rf "$tree/vendor/github.com/modern-go/reflect2"
cp -rL "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/"
rm -f "$tree"/vendor/github.com/modern-go/reflect2/*_test.go

export HOME=$work/home GO111MODULE=off CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=

echo "Building apiextensions-apiserver"
version=$(dpkg-deb -f golang-k8s-apiextensions-apiserver-dev_*.deb Version | cut -d- -f1)
stamp=k8s.io/component-base/version
GOROOT=$work/root/usr/lib/go-1.27 GOPATH=$work/root/usr/share/gocode GOCACHE=$work/cache-new \
    "$work/root/usr/lib/go-1.27/bin/go" build -o "$work/apiextensions-apiserver" \
    -ldflags "-s -w -X $stamp.gitVersion=v1.${version#0.} -X $stamp.gitMajor=1 -X $stamp.gitMinor=$(cut -d. -f2 <<< "$version")" \
    k8s.io/apiextensions-apiserver

echo "Building kube-apiserver and kube-controller-manager"
export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/cache-old
export PATH=$GOROOT/bin:$PATH
cd "$tree"
# What Debian's source lacks: the generated OpenAPI, without which the server does not compile.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
folders=$(grep -Rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin vendor/k8s.io/*/ |
    grep -Ev 'code-generator/|sample-apiserver/|/testdata/|kube-openapi/|_test.go' |
    xargs -n1 dirname | LC_ALL=C sort -u | sed 's#^#k8s.io/kubernetes/#' | paste -sd, -)
"$work/openapi-gen" --logtostderr -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi \
    -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt \
    -r "$work/openapi-report.txt"
flags="-s -w"
for stamp in component-base/version client-go/pkg/version; do
    stamp=k8s.io/kubernetes/vendor/k8s.io/$stamp
    flags="$flags -X $stamp.gitVersion=v1.20.2 -X $stamp.gitMajor=1 -X $stamp.gitMinor=20 -X $stamp.gitTreeState=clean"
done
go build -ldflags "$flags" -o "$work/" ./cmd/kube-apiserver ./cmd/kube-controller-manager

mv "$work"/{apiextensions-apiserver,kube-apiserver,kube-controller-manager} "$work/root/usr/bin/etcd" "$out/"
touch "$out/READY"
echo "The control plane is in $out."
