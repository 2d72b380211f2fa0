"""Journals and object stores: real servers that answer, refuse, or are not there."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.http_servers import QuietHandler, serve_http
from tests.servers import BUCKET, RedisServer, S3Server, run_silent_server
from tests.unit.torchmoor.doctor.conftest import MakePlan
from torchmoor.doctor.finding import Finding, Level
from torchmoor.doctor.services import RESULTS, check_journal, check_store
from torchmoor.wire.store_urls import RESULT_SCHEMES

# boto3's client is closed, but connections that it left to urllib3 are reported when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def examine(make_plan: MakePlan, url: str) -> list[Finding]:
    return list(check_journal(make_plan(journal=url)))


@pytest.mark.redis
def test_a_redis_that_answers_is_all_right(make_plan: MakePlan, redis_server: RedisServer) -> None:
    """A Redis that answers is right, and no finding contains its password."""
    [finding] = examine(make_plan, redis_server.url)

    assert finding.level is Level.OK
    assert redis_server.address in finding.found
    assert "p%40ss" not in finding.found
    assert redis_server.password not in finding.found


@pytest.mark.redis
def test_a_redis_with_another_password_is_a_problem(make_plan: MakePlan, redis_server: RedisServer) -> None:
    """A wrong password for Redis is reported as such, not as an unreachable server."""
    [finding] = examine(make_plan, f"redis://journal:wrong@{redis_server.address}/0")

    assert finding.level is Level.PROBLEM
    assert "password" in finding.found
    assert "wrong@" not in finding.found


@pytest.mark.redis
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_may_evict_live_sessions_is_warned_of(
    make_plan: MakePlan, redis_server: RedisServer, policy: str
) -> None:
    """Each policy but noeviction is named, also to a user who may not read the configuration."""
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.acl_setuser("limited", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", "-config"])
        try:
            findings = [
                *examine(make_plan, redis_server.url),
                *examine(make_plan, f"redis://limited:secret@{redis_server.address}/0"),
            ]
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.acl_deluser("limited")

    for finding in findings:
        assert finding.level is Level.WARNING
        assert f"maxmemory-policy is {policy}" in finding.found
        assert "noeviction" in finding.remedy
    assert len(findings) == 2


@pytest.mark.redis
def test_a_redis_that_does_not_show_its_policy_is_all_right(make_plan: MakePlan, redis_server: RedisServer) -> None:
    """Some services forbid both commands that show the policy, so their refusal is not a finding."""
    with redis_server.client() as client:
        forbidden = ["+@all", "-config", "-info"]
        client.acl_setuser("limited", enabled=True, passwords=["+secret"], keys=["*"], commands=forbidden)
        try:
            [finding] = examine(make_plan, f"redis://limited:secret@{redis_server.address}/0")
        finally:
            client.acl_deluser("limited")

    assert finding.level is Level.OK


@pytest.mark.parametrize(
    ("url", "found", "remedy"),
    [
        ("redis://127.0.0.1:9/0", "does not answer", ""),
        ("valkey://127.0.0.1:9/0", "does not answer", ""),
        ("redis://127.0.0.1:9/journal", "needs a host and a database's number", ""),
        ("redis:///0", "needs a host and a database's number", ""),
        ("sqlite:///tmp/queue", "", "redis"),
        ("ftp://127.0.0.1/x", "", "redis"),
    ],
)
def test_a_store_that_a_journal_cannot_use_is_a_problem(make_plan: MakePlan, url: str, found: str, remedy: str) -> None:
    """Only a queue may be a SQLite file."""
    [finding] = examine(make_plan, url)

    assert finding.level is Level.PROBLEM
    assert found in finding.found
    assert remedy in finding.remedy
    assert "sqlite" not in finding.remedy


def test_a_server_that_never_answers_is_a_problem_in_a_while(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer is a problem after the check's time-out."""
    monkeypatch.setattr("torchmoor.doctor.services.TIMEOUT_S", 0.2)
    with run_silent_server() as port:
        [finding] = examine(make_plan, f"redis://127.0.0.1:{port}/0")

    assert finding.level is Level.PROBLEM


@pytest.mark.s3
def test_a_bucket_is_looked_at_with_these_credentials(
    make_plan: MakePlan, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is accepted, missing or forbidden with these credentials; the check also compares the server's clock."""
    s3_server.use_in(monkeypatch)
    [good, clock] = examine(make_plan, f"s3://{BUCKET}/prefix")
    missing = examine(make_plan, "s3://no-such-bucket/prefix")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused = examine(make_plan, f"s3://{BUCKET}/prefix")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    away = examine(make_plan, f"s3://{BUCKET}/prefix")

    assert (good.level, clock.level, clock.check) == (Level.OK, Level.OK, "clock")
    assert (missing[0].level, "no such bucket" in missing[0].found) == (Level.PROBLEM, True)
    assert (refused[0].level, "may not list it" in refused[0].found) == (Level.PROBLEM, True)
    assert (away[0].level, "cannot be reached" in away[0].found) == (Level.PROBLEM, True)


class NarrowStore(QuietHandler):
    """S3 for the role of deploy/sagemaker: it may list the sessions, and nothing else of the bucket."""

    def do_HEAD(self) -> None:
        self.reply(403)

    def do_GET(self) -> None:
        if parse_qs(urlsplit(self.path).query).get("prefix") == ["sessions/"]:
            self.reply(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        else:
            self.reply(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")


def test_rights_on_a_prefix_suffice(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal below a prefix that may be listed is right. Results are written and not listed, so it is a warning."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with serve_http(NarrowStore) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        good, *_ = examine(make_plan, "s3://bucket/sessions")
        bad, *_ = examine(make_plan, "s3://bucket/other")
        unknown, *_ = check_store(RESULTS, "s3://bucket/async/results", RESULT_SCHEMES)

    assert (good.level, bad.level, unknown.level) == (Level.OK, Level.PROBLEM, Level.WARNING)
    assert "may not list it (AccessDenied)" in bad.found


def test_a_folder_is_written_to(make_plan: MakePlan, tmp_path: Path) -> None:
    """A folder is tested by writing to it, and may not exist yet."""
    [good] = examine(make_plan, (tmp_path / "journal").as_uri())
    [bad] = examine(make_plan, "file:///proc/journal")

    assert (good.level, bad.level) == (Level.OK, Level.PROBLEM)
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(
    ("url", "level"),
    [("off", Level.WARNING), ("gopher://x/", Level.PROBLEM), ("redis://x:port/0", Level.PROBLEM)],
)
def test_a_journal_that_is_none_is_told(make_plan: MakePlan, url: str, level: Level) -> None:
    """A journal may be switched off, but an invalid URL is a problem."""
    assert [finding.level for finding in examine(make_plan, url)] == [level]
