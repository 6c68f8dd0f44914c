"""What deploy/ holds beside proxies: the chart through Helm, manifests against Kubernetes' schemas, Dockerfiles
through hadolint, the unit through systemd-analyze. KVBATON_RENDER=1 writes deploy/kubernetes anew."""

import os
import re
import shutil
import subprocess
import tomllib

import kubernetes_validate
import pytest
import yaml
from conftest import DEPLOY, ROOT
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

CHART = DEPLOY / "helm/kvbaton"
VERSIONS = ["1.29", "1.37"]
HEAD = "# Made of the chart in deploy/helm by KVBATON_RENDER=1 scripts/test-deploy -k plain; do not change by hand.\n"
WITH_ENGINES = {"engines": {"enabled": True}}
WITH_DISCOVERY = {"discovery": {"enabled": True, "namespaces": ["default", "llm"]}}


def render(values=None):
    # Not the notes, which are no manifest.
    chart = Chart.load(CHART)
    files = chart.render(values or {}, name="kvbaton", namespace="default")
    parts = [text.strip() for name, text in sorted(files.items()) if name.endswith(".yaml") and text.strip()]
    return "\n---\n".join(part.removeprefix("---\n") for part in parts) + "\n"


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def find(text, kind, name):
    found = [one for one in documents(text) if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, (kind, name)
    return found[0]


@pytest.mark.parametrize("values", [{}, WITH_ENGINES, WITH_DISCOVERY])
def test_helm_finds_nothing_to_complain_about(values):
    report = lint(CHART, values, strict=True)
    grave = [message for message in report["messages"] if message["severity"] > 1]
    assert grave == [] and report["errors"] == []


@pytest.mark.parametrize("values", [{}, WITH_ENGINES, WITH_DISCOVERY])
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_what_kubernetes_knows(values, version):
    kinds = set()
    for document in documents(render(values)):
        kubernetes_validate.validate(document, version, strict=True)
        kinds.add(document["kind"])
    rights = {"Role", "RoleBinding"} if values == WITH_DISCOVERY else set()
    assert kinds == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"} | rights


def test_the_plain_manifest_is_the_chart_with_its_engines():
    file = DEPLOY / "kubernetes/kvbaton.yaml"
    text = HEAD + render(WITH_ENGINES)
    if os.environ.get("KVBATON_RENDER"):
        file.write_text(text)
    assert file.read_text() == text


def test_the_chart_refuses_what_cannot_work():
    for values in [{"replicas": 2}, {"replicas": 0}, {"imagge": {}}]:
        with pytest.raises(HelmError):
            chart = Chart.load(CHART)
            chart.validate_schema(values)
            chart.render(values, name="kvbaton")
    settings = Chart.load(CHART).values["settings"] + '\n[store]\nkind = "etcd"\n'
    assert find(render({"replicas": 2, "settings": settings}), "Deployment", "kvbaton")["spec"]["replicas"] == 2


def test_the_charts_settings_are_right_and_fit_its_pods(tmp_path):
    text = render()
    settings = find(text, "ConfigMap", "kvbaton-settings")["data"]["kvbaton.toml"]
    parsed = tomllib.loads(settings)
    pod = find(text, "Deployment", "kvbaton")["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    for name, listen in [
        ("http", parsed["listen"]),
        ("admin", parsed["admin"]["listen"]),
        ("registry", parsed["registry"]["listen"]),
    ]:
        assert listen == f"0.0.0.0:{ports[name]}"
    limit = int(parsed["shutdown"]["limit"].removesuffix("s"))
    assert limit < pod["terminationGracePeriodSeconds"]
    # The program takes them, but for what only a pod has.
    for name in ["operators", "engines"]:
        (tmp_path / name).write_text(f"token-of-{name}\n")
    settings = settings.replace("/run/secrets/kvbaton", str(tmp_path))
    file = tmp_path / "kvbaton.toml"
    file.write_text(re.sub(r'"0\.0\.0\.0:80\d\d"', '"127.0.0.1:0"', settings))
    command = [os.environ["KVBATON_BIN"], "check", "--config", str(file), "--wait", "0"]
    # KVBATON_BIN is no setting.
    checked = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (1, ""), checked
    assert "there are no engines" in checked.stdout, checked


def test_discovery_brings_the_right_to_watch_endpoint_slices_and_nothing_else():
    account = "automountServiceAccountToken"
    assert not find(render(), "Deployment", "kvbaton")["spec"]["template"]["spec"][account]
    text = render(WITH_DISCOVERY)
    assert find(text, "Deployment", "kvbaton")["spec"]["template"]["spec"][account]
    roles = [one for one in documents(text) if one["kind"] == "Role"]
    assert [role["metadata"]["namespace"] for role in roles] == ["default", "llm"]
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert all(role["rules"] == [rule] for role in roles)
    for binding in (one for one in documents(text) if one["kind"] == "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kvbaton", "namespace": "default"}]
    own = [one for one in documents(render({"discovery": {"enabled": True}})) if one["kind"] == "Role"]
    assert [role["metadata"]["namespace"] for role in own] == ["default"]
    settings = Chart.load(CHART).values["settings"] + "\n[[discovery.kubernetes]]\n"
    with pytest.raises(HelmError):
        render({"settings": settings})
    assert "discovery" in render({"settings": settings, **WITH_DISCOVERY})


def test_engines_of_the_chart_register_where_the_router_listens():
    text = render(WITH_ENGINES)
    ports = {port["name"]: port["port"] for port in find(text, "Service", "kvbaton-internal")["spec"]["ports"]}
    for role, kv_role in [("prefill", "kv_producer"), ("decode", "kv_consumer")]:
        engine = find(text, "Deployment", f"kvbaton-{role}")["spec"]["template"]["spec"]["containers"][0]
        env = {one["name"]: one.get("value") for one in engine["env"]}
        assert env["KVBATON_REGISTRY"] == f"http://kvbaton-internal:{ports['registry']}"
        config = next(arg for arg in engine["args"] if arg.startswith("--kv-transfer-config="))
        assert f'"kv_role": "{kv_role}"' in config and yaml.safe_load(config.split("=", 1)[1])


@pytest.mark.parametrize("name", ["Dockerfile", "vllm.Dockerfile"])
def test_dockerfiles_are_clean_and_copy_what_exists(name):
    file = DEPLOY / "docker" / name
    checked = subprocess.run(["hadolint", str(file)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout
    for source in re.findall(r"^COPY (?!--from)(\S+) ", file.read_text(), re.M):
        assert (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "/target" in ignored and "/static" not in ignored


def test_envoys_configuration_is_yaml_with_long_streams():
    envoy = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())["static_resources"]
    manager = envoy["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert routes[-1]["route"]["timeout"] == "0s"
    assert envoy["clusters"][0]["health_checks"][0]["http_health_check"]["path"] == "/readyz"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd on this host")
def test_the_unit_is_known_to_systemd_and_well_shut_in(tmp_path):
    text = (DEPLOY / "systemd/kvbaton.service").read_text()
    text = re.sub(r"^Documentation=.*\n", "", text, flags=re.M)
    unit = tmp_path / "kvbaton.service"
    unit.write_text(text.replace("/usr/local/bin/kvbaton", os.environ["KVBATON_BIN"]))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0 and "kvbaton.service" not in checked.stderr, checked.stderr
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout
