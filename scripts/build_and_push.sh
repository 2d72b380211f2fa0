#!/usr/bin/env bash
# Build the image of deploy/docker/Dockerfile and push it to ECR; --help says how.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'TEXT'
Usage: scripts/build_and_push.sh [OPTION]... [NAME TAG IMAGE REGION ACCOUNT]

Build the image with docker, podman or buildah, log in to ECR, make the repository if it is missing, and push. The last
line, alone on standard output, is the image's URI, for scripts/deploy_sagemaker.py --image.

The five arguments of AWS's LLaVA sample are the repository, the tag, the base image, the region, and the account, which
must be the credentials' own.

  --repository NAME    (torchmoor)
  --tag TAG            (this commit, with -dirty if there are changes)
  --region REGION      of ECR (AWS_REGION, AWS_DEFAULT_REGION, or the profile's)
  --profile NAME       of the AWS configuration
  --base-image IMAGE   to build on, such as an AWS deep learning container (the Dockerfile's own)
  --torch WHICH        cpu, cuda, cuda12 (for older drivers), or of the base image: base, vllm (cpu)
  --build-arg ARG=VAL  for the Dockerfile; may be given several times
  --file FILE          (deploy/docker/Dockerfile)
  --engine NAME        docker, podman or buildah (the first one that is there)
  --registry HOST      push there instead of to this account's ECR; no log-in and no repository is made there
  --plain-http         that registry has no TLS (podman and buildah)
  --no-push            build only
  --dry-run            print the commands and run none; nothing is asked of AWS
  --help
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 1
}

repository=torchmoor tag='' region='' profile='' base='' torch='' file=$root/deploy/docker/Dockerfile
engine='' registry='' plain_http=false pushes=true dry=false
arguments=() given=() account=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --plain-http) plain_http=true; shift; continue ;;
    --no-push) pushes=false; shift; continue ;;
    --dry-run) dry=true; shift; continue ;;
    --repository | --tag | --region | --profile | --base-image | --torch | --build-arg | --file | --engine | --registry)
      [ $# -ge 2 ] || fail "$1 needs a value" ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *) given+=("$1"); shift; continue ;;
  esac
  case $1 in
    --repository) repository=$2 ;;
    --tag) tag=$2 ;;
    --region) region=$2 ;;
    --profile) profile=$2 ;;
    --base-image) base=$2 ;;
    --torch) torch=$2 ;;
    --build-arg) arguments+=(--build-arg "$2") ;;
    --file) file=$2 ;;
    --engine) engine=$2 ;;
    --registry) registry=$2 ;;
  esac
  shift 2
done

case ${#given[@]} in
  0) ;;
  5) repository=${given[0]} tag=${given[1]} base=${given[2]} region=${given[3]} account=${given[4]} ;;
  *) fail "there are ${#given[@]} arguments; give options alone, or NAME TAG IMAGE REGION ACCOUNT" ;;
esac

if [ -z "$engine" ]; then
  for each in docker podman buildah; do
    # A docker command without its daemon builds nothing.
    if command -v "$each" >/dev/null && { [ "$each" != docker ] || docker info >/dev/null 2>&1; }; then
      engine=$each
      break
    fi
  done
  [ -n "$engine" ] || fail "neither docker (with its daemon), podman nor buildah is here; install one of them"
fi
case $engine in docker | podman | buildah) ;; *) fail "--engine must be docker, podman or buildah, not $engine" ;; esac
case ${torch:-cpu} in
  cpu | cuda | cuda12 | base | vllm) ;;
  *) fail "--torch must be cpu, cuda, cuda12, base or vllm, not $torch" ;;
esac
[ -f "$file" ] || fail "there is no $file"

region=${region:-${AWS_REGION:-${AWS_DEFAULT_REGION:-}}}
if [ -z "$tag" ]; then
  tag=$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null) || fail "this is not a git checkout; give --tag"
  [ -z "$(git -C "$root" status --porcelain)" ] || tag+=-dirty
fi
[ -z "$base" ] || arguments+=(--build-arg "BASE_IMAGE=$base")
[ -z "$torch" ] || arguments+=(--build-arg "TORCH=$torch")

python=$root/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || fail "there is no Python; run make setup"
ecr=("$python" "$root/scripts/ecr.py")
options=()
[ -z "$region" ] || options+=(--region "$region")
[ -z "$profile" ] || options+=(--profile "$profile")

run() {
  if $dry; then
    printf '%q ' "$@" | sed 's/ $/\n/' >&2
  else
    "$@" >&2
  fi
}

# The password goes through a pipe: an argument could be read by everybody on this machine.
log_in() { # HOST ACCOUNT REGION
  local command=("${ecr[@]}" password "$2" --region "$3") login=("$engine" login --username AWS --password-stdin "$1")
  [ -z "$profile" ] || command+=(--profile "$profile")
  if $dry; then
    { printf '%q ' "${command[@]}" '|' "${login[@]}" | sed 's/\\|/|/; s/ $/\n/'; } >&2
  else
    "${command[@]}" | "${login[@]}" >&2
  fi
}

is_ecr() { [[ $1 =~ ^([0-9]{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?(/|$) ]]; }

is_own=false
if [ -z "$registry" ] && $pushes; then
  is_own=true
  if $dry; then
    registry="${account:-ACCOUNT}.dkr.ecr.${region:-REGION}.amazonaws.com"
  else
    registry=$("${ecr[@]}" registry "${options[@]}") || fail "AWS does not say whose account this is"
    [ -z "$account" ] || [ "${registry%%.*}" = "$account" ] ||
      fail "the credentials are those of account ${registry%%.*}, not $account"
  fi
fi
uri=${registry:+$registry/}$repository:$tag

# An AWS deep learning container lies in a registry of AWS's own, which wants a log-in too.
if [ -n "$base" ] && is_ecr "$base"; then
  log_in "${base%%/*}" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
fi

# SageMaker refuses OCI manifests, and the lists that docker makes for its attestations.
case $engine in
  docker) build=(env BUILDX_NO_DEFAULT_ATTESTATIONS=1 docker build) push=(docker push "$uri") ;;
  podman) build=(podman build --format docker) push=(podman push --format v2s2 "$uri") ;;
  buildah) build=(buildah build --format docker) push=(buildah push --format v2s2 "$uri" "docker://$uri") ;;
esac
if $plain_http && [ "$engine" != docker ]; then
  push=("${push[0]}" "${push[1]}" --tls-verify=false "${push[@]:2}")
fi

run "${build[@]}" "${arguments[@]}" --file "$file" --tag "$uri" "$root"
if $pushes; then
  if $is_own; then
    run "${ecr[@]}" create "$repository" "${options[@]}"
    if is_ecr "$registry"; then
      log_in "$registry" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    else
      log_in "$registry" ACCOUNT "${region:-REGION}" # of a dry run
    fi
  fi
  run "${push[@]}"
fi
echo "$uri"
