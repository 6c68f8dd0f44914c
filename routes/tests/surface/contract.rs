//! `openapi.yaml`, the list of endpoints and what is mounted are one and the same set.

use std::collections::BTreeSet;

use http::{Method, StatusCode};
use kvbaton_routes::{Audience, ENDPOINTS};
use serde_json::Value;

use crate::support::{Ask, Surface};

const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

fn contract() -> Value {
    serde_yaml_ng::from_str(include_str!("../../../openapi.yaml")).unwrap()
}

/// Every (path, method, operation) of the contract.
fn operations(contract: &Value) -> Vec<(String, String, &Value)> {
    let mut operations = Vec::new();
    for (path, item) in contract["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if METHODS.contains(&method.as_str()) {
                operations.push((path.clone(), method.to_uppercase(), operation));
            }
        }
    }
    operations
}

fn listed() -> BTreeSet<(String, String)> {
    ENDPOINTS.iter().map(|endpoint| (endpoint.contract_path(), endpoint.method.to_string())).collect()
}

/// A path of the list with something in place of its parameters.
fn concrete(path: &str) -> String {
    path.replace("{*model}", "org/model")
        .replace("{pp_rank}", "0")
        .replace("{tp_rank}", "0")
        .replace(['{', '}'], "")
}

#[test]
fn the_contract_describes_exactly_the_listed_endpoints() {
    let contract = contract();
    assert_eq!(contract["openapi"], "3.1.0");
    let described: BTreeSet<_> =
        operations(&contract).into_iter().map(|(path, method, _)| (path, method)).collect();
    assert_eq!(described, listed());
    assert_eq!(ENDPOINTS.len(), described.len(), "no endpoint is listed twice");
}

#[test]
fn guarded_endpoints_are_exactly_those_with_a_security_rule() {
    let contract = contract();
    let secured: BTreeSet<_> = operations(&contract)
        .into_iter()
        .filter(|(_, _, operation)| operation.get("security").is_some())
        .map(|(path, method, _)| (path, method))
        .collect();
    let guarded: BTreeSet<_> = ENDPOINTS
        .iter()
        .filter(|endpoint| endpoint.audience != Audience::Everybody)
        .map(|endpoint| (endpoint.contract_path(), endpoint.method.to_string()))
        .collect();
    assert_eq!(secured, guarded);
}

#[test]
fn every_operation_has_its_own_id_and_every_reference_a_target() {
    let contract = contract();
    let operations = operations(&contract);
    let ids: BTreeSet<_> =
        operations.iter().map(|(_, _, operation)| operation["operationId"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), operations.len());
    let mut open = vec![&contract];
    let mut references = 0;
    while let Some(value) = open.pop() {
        match value {
            Value::Object(members) => {
                if let Some(Value::String(reference)) = members.get("$ref") {
                    let pointer = reference.strip_prefix('#').unwrap();
                    assert!(contract.pointer(pointer).is_some(), "{reference}");
                    references += 1;
                }
                open.extend(members.values());
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    assert_ne!(references, 0);
}

#[tokio::test]
async fn every_listed_endpoint_is_mounted() {
    let surface = Surface::new();
    // A watch of a router that stays would not end.
    surface.proxy.drain();
    for endpoint in ENDPOINTS {
        let path = concrete(endpoint.path);
        let answer = surface.ask(Ask::new(endpoint.method.clone(), &path)).await;
        assert_ne!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{} {path}", endpoint.method);
        let fell_through =
            answer.status == StatusCode::NOT_FOUND && answer.json()["error"]["code"] == "unknown_endpoint";
        assert!(!fell_through, "{} {path}", endpoint.method);
    }
}

#[tokio::test]
async fn no_method_beyond_the_list_is_answered() {
    let surface = Surface::new();
    let methods = [
        Method::GET,
        Method::PUT,
        Method::POST,
        Method::DELETE,
        Method::PATCH,
        Method::OPTIONS,
        Method::TRACE,
    ];
    let mut refused = 0;
    for endpoint in ENDPOINTS {
        for method in &methods {
            if listed().contains(&(endpoint.contract_path(), method.to_string())) {
                continue;
            }
            let answer = surface.ask(Ask::new(method.clone(), &concrete(endpoint.path))).await;
            answer.expect_error(405, "invalid_request_error", None, "method_not_allowed");
            let allow: BTreeSet<_> = answer.header("allow").split(',').collect();
            let here = ENDPOINTS.iter().filter(|other| other.path == endpoint.path);
            let mut expected: BTreeSet<_> = here.map(|other| other.method.as_str()).collect();
            if expected.contains("GET") {
                expected.insert("HEAD");
            }
            assert_eq!(allow, expected, "{method} {}", endpoint.path);
            refused += 1;
        }
    }
    assert_ne!(refused, 0);
}
