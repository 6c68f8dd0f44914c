//! The table in docs/test-rows.md names every row of vLLM's tests and only tests that are where it says.

use std::collections::{BTreeSet, HashMap};
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

/// The sources of a file, of a module without its ending, and of all its children.
fn sources(path: &Path, text: &mut String) {
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            sources(&entry.unwrap().path(), text);
        }
    }
    for file in [path.to_owned(), path.with_extension("rs")] {
        if file.is_file() && file.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(file).unwrap());
            return;
        }
    }
}

fn defines(text: &str, test: &str) -> bool {
    // Plain tests, and the rows of tables that macros make tests of.
    text.contains(&format!("fn {test}("))
        || text.lines().any(|line| {
            let rest = line.trim_start().strip_prefix(test);
            rest.is_some_and(|rest| rest.starts_with(':') || rest.starts_with(" =>"))
        })
}

#[test]
fn the_table_of_rows_is_complete_and_names_real_tests() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(crate_folder.join("docs/test-rows.md")).unwrap();
    let mut texts = HashMap::new();
    let mut named = BTreeSet::new();
    for line in table.lines().filter(|line| line.starts_with("| T")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert!(named.insert(cells[1].to_owned()), "{line}");
        let tests: Vec<&str> = cells[2].split('`').filter(|cell| cell.starts_with('t')).collect();
        assert!(!tests.is_empty(), "{line}");
        let places: Vec<&str> = cells[3].split(", ").collect();
        for place in &places {
            texts.entry(*place).or_insert_with(|| {
                let mut text = String::new();
                sources(&crate_folder.join(place), &mut text);
                text
            });
            let used = tests.iter().any(|test| defines(&texts[place], test));
            assert!(used, "{place} has no test of {line}");
        }
        for test in tests {
            let found = places.iter().any(|place| defines(&texts[place], test));
            assert!(found, "{test} is not where the table says");
        }
    }
    let rows = (1..=65).flat_map(|row| match PARAMETRIZED.iter().find(|(number, _)| *number == row) {
        Some((_, count)) => (1..=*count).map(|k| format!("T{row}.{k}")).collect(),
        None => vec![format!("T{row}")],
    });
    assert_eq!(named, rows.collect::<BTreeSet<_>>());
    let functions: BTreeSet<&str> = named.iter().map(|row| row.split('.').next().unwrap()).collect();
    assert_eq!((functions.len(), named.len()), (65, 157));
}
