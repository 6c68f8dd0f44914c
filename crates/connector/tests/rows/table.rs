//! The table in docs/test-rows.md names every row of vLLM's tests and only tests that exist.

use std::collections::BTreeSet;
use std::path::Path;

/// Rows with parametrizations, and how many each has.
const PARAMETRIZED: [(u32, u32); 18] = [
    (6, 8),
    (8, 4),
    (9, 2),
    (26, 2),
    (30, 24),
    (32, 1),
    (38, 2),
    (40, 3),
    (46, 4),
    (47, 8),
    (48, 10),
    (50, 2),
    (52, 4),
    (53, 2),
    (55, 9),
    (60, 10),
    (61, 11),
    (62, 4),
];

fn sources(folder: &Path, text: &mut String) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn the_table_of_rows_is_complete_and_names_real_tests() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(crate_folder.join("docs/test-rows.md")).unwrap();
    let mut text = String::new();
    ["src", "tests"].into_iter().for_each(|folder| sources(&crate_folder.join(folder), &mut text));
    let mut named = BTreeSet::new();
    for line in table.lines().filter(|line| line.starts_with("| T")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert!(named.insert(cells[1].to_owned()), "{line}");
        let tests: Vec<&str> = cells[2].split('`').filter(|cell| cell.starts_with('t')).collect();
        assert!(!tests.is_empty(), "{line}");
        for test in tests {
            assert!(text.contains(test), "{test} is not in the tree");
        }
    }
    let rows = (1..=65).flat_map(|row| match PARAMETRIZED.iter().find(|(number, _)| *number == row) {
        Some((_, count)) => (1..=*count).map(|k| format!("T{row}.{k}")).collect(),
        None => vec![format!("T{row}")],
    });
    let missing: Vec<String> = rows.filter(|row| !named.contains(row)).collect();
    assert_eq!(missing, Vec::<String>::new());
}
