//! The table in docs/vectors.md names every list of every golden file and only tests that read it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

/// What the table says: the test files of each list of each golden file.
fn table(crate_folder: &Path) -> BTreeMap<(String, String), Vec<String>> {
    let text = std::fs::read_to_string(crate_folder.join("docs/vectors.md")).unwrap();
    let mut rows = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| ") && line.contains(".json")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let tests = cells[3].split(", ").map(str::to_owned).collect();
        assert!(rows.insert((cells[1].to_owned(), cells[2].to_owned()), tests).is_none(), "{line}");
    }
    rows
}

/// The lists and objects at the top of a golden file; texts only say where it comes from.
fn lists(file: &Path) -> BTreeMap<String, Value> {
    let golden: BTreeMap<String, Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    golden.into_iter().filter(|(_, value)| !value.is_string()).collect()
}

#[test]
fn the_table_of_vectors_is_complete_and_names_tests_that_read_them() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rows = table(crate_folder);
    let mut seen = BTreeSet::new();
    for entry in std::fs::read_dir(crate_folder.join("../../tests/fixtures/vectors")).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        for (list, cases) in lists(&path) {
            let row = (file.clone(), list.clone());
            let tests = rows.get(&row).unwrap_or_else(|| panic!("{file} has {list}, the table has not"));
            let mut texts = String::new();
            for test in tests {
                let text = std::fs::read_to_string(crate_folder.join(test))
                    .unwrap_or_else(|error| panic!("{file} {list}: {test}: {error}"));
                for word in [&file, &list] {
                    assert!(text.contains(&format!("\"{word}\"")), "{test} does not read {word} of {file}");
                }
                texts.push_str(&text);
            }
            assert_every_kind_is_named(&file, &cases, &texts);
            seen.insert(row);
        }
    }
    assert_eq!(rows.into_keys().collect::<BTreeSet<_>>(), seen);
}

/// Lists of mixed cases are read kind by kind: each kind, or what it begins with, stands in a test.
fn assert_every_kind_is_named(file: &str, cases: &Value, texts: &str) {
    let words: BTreeSet<&str> = texts.split('"').filter(|word| word.len() >= 5).collect();
    let cases = cases.as_array().map_or(&[][..], Vec::as_slice);
    for kind in cases.iter().filter_map(|case| case["kind"].as_str()) {
        assert!(words.iter().any(|word| kind.starts_with(word)), "no test reads {kind} of {file}");
    }
}
