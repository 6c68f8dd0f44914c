//! The page for operators: where it is, what it may do, and what needs a token.

use http::Method;
use kvbaton_routes::{Mounts, Rules};

use crate::support::{Ask, Surface};

#[tokio::test]
async fn the_page_and_its_files_are_there_with_a_strict_policy() {
    let surface = Surface::with_token();
    let page = surface.ask(Ask::get("/dashboard").sent_from("10.0.0.9:40000")).await;
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, "text/html; charset=utf-8"));
    let html = String::from_utf8(page.body.to_vec()).unwrap();
    let mut files = 0;
    for name in html.split("=\"/dashboard/").skip(1).filter_map(|rest| rest.split('"').next()) {
        let file = surface.ask(Ask::get(&format!("/dashboard/{name}"))).await;
        assert_eq!(file.status, 200, "{name}");
        assert!(file.header("content-security-policy").starts_with("default-src 'none'; script-src 'self';"));
        assert_eq!(
            (
                file.header("x-content-type-options"),
                file.header("referrer-policy"),
                file.header("cache-control")
            ),
            ("nosniff", "no-referrer", "no-cache")
        );
        files += 1;
    }
    assert!(files >= 3, "{files}");
    for inline in ["<script>", "<style", " style=", " onclick=", "http:", "https:"] {
        assert!(!html.contains(inline), "{inline}");
    }
}

#[tokio::test]
async fn every_module_that_a_script_imports_is_there() {
    let surface = Surface::new();
    let mut names = vec!["app.js".to_owned()];
    let mut seen = 0;
    while let Some(name) = names.get(seen).cloned() {
        let file = surface.ask(Ask::get(&format!("/dashboard/{name}"))).await;
        assert_eq!(
            (file.status.as_u16(), file.header("content-type")),
            (200, "text/javascript; charset=utf-8"),
            "{name}"
        );
        let text = String::from_utf8(file.body.to_vec()).unwrap();
        for imported in text.split(" from \"./").skip(1).filter_map(|rest| rest.split('"').next()) {
            if !names.iter().any(|known| known == imported) {
                names.push(imported.to_owned());
            }
        }
        seen += 1;
    }
    assert!(seen > 5, "{names:?}");
}

#[tokio::test]
async fn a_file_that_the_browser_has_is_not_sent_again() {
    let surface = Surface::new();
    let first = surface.ask(Ask::get("/dashboard/app.js")).await;
    let tag = first.header("etag").to_owned();
    assert!(tag.len() > 10 && tag.starts_with('"'), "{tag}");
    for known in [tag.clone(), format!("\"other\", {tag}"), format!("W/{tag}"), "*".to_owned()] {
        let again = surface.ask(Ask::get("/dashboard/app.js").header("if-none-match", &known)).await;
        assert_eq!(
            (again.status.as_u16(), again.body.len(), again.header("etag")),
            (304, 0, tag.as_str()),
            "{known}"
        );
    }
    let changed = surface.ask(Ask::get("/dashboard/app.js").header("if-none-match", "\"other\"")).await;
    assert_eq!(changed.status, 200);
    let head = surface.ask(Ask::new(Method::HEAD, "/dashboard")).await;
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
}

#[tokio::test]
async fn nothing_but_its_files_is_served() {
    let surface = Surface::new();
    for name in ["nothing.js", "..%2FCargo.toml", "%2e%2e", "INDEX.HTML"] {
        let answer = surface.ask(Ask::get(&format!("/dashboard/{name}"))).await;
        answer.expect_error(404, "not_found_error", None, "unknown_file");
    }
}

#[tokio::test]
async fn it_is_where_the_operators_endpoints_are_and_nowhere_else() {
    let clients = Surface::mounting(Rules::default(), Mounts { clients: true, ..Mounts::NONE }, &[]);
    for path in ["/dashboard", "/dashboard/app.js"] {
        clients.ask(Ask::get(path)).await.expect_error(404, "not_found_error", None, "unknown_endpoint");
    }
    let operators = Surface::mounting(Rules::default(), Mounts { operators: true, ..Mounts::NONE }, &[]);
    assert_eq!(operators.ask(Ask::get("/dashboard")).await.status, 200);
}

#[tokio::test]
async fn what_it_shows_needs_the_operators_token() {
    let surface = Surface::with_token();
    for path in ["/admin/events", "/admin/requests", "/admin/requests/a"] {
        let answer = surface.ask(Ask::get(path)).await;
        answer.expect_error(401, "authentication_error", None, "token_required");
        let answer = surface.ask(Ask::get(path).bearer("other")).await;
        answer.expect_error(401, "authentication_error", None, "token_wrong");
    }
}

#[tokio::test]
async fn a_query_that_is_none_is_refused() {
    let surface = Surface::new();
    for query in ["limit=0", "limit=1001", "limit=a", "state=tired", "other=1"] {
        let answer = surface.ask(Ask::get(&format!("/admin/requests?{query}"))).await;
        answer.expect_error(400, "invalid_request_error", None, "invalid_query");
    }
}
