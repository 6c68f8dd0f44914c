//! The page about the command line, made of what `--help` prints.

use std::fmt::Write as _;

use clap::CommandFactory as _;

use super::Cli;
use super::fault::CODES;

/// Columns of the help texts.
const WIDTH: usize = 100;

const HEAD: &str = "\
# The command line

`kvbaton docs cli > docs/cli.md` makes this page from the code.

`kvbaton` without a subcommand runs the router, as `kvbaton serve` does. `peers`, `top` and `trace` ask a running
router over its operators' endpoints (`docs/security.md`): `--router` says where those are, `--token-file` or
`OPERATOR_TOKEN` holds the operator's token, and `--cert` with `--key` a certificate. No token is ever an argument.

`kvbaton check` has every prefill engine hand off to every decode engine once, and says of each pair whether it works,
what is wrong and what to do. It always uses a router's own hand-offs, not a copy of them: with `--router` those of the
router that runs there; without it those of a router that it starts from the same settings, flags and environment as
`serve`, on the same addresses (engines that register find it there), and ends afterwards. So without `--router` the
addresses of the settings must be free, and what registered with it registers anew with the next router. Without
engines in the settings it checks the simulated fleet. A pair works when its decode engine answers; where that engine
counts its transfers (`vllm:nixl_xfer_time_seconds`), it must also have counted one meanwhile, which other requests
on a busy router may hide.

`kvbaton check --only-settings` reads file, environment and flags as the router would, says all that is wrong with
them, and starts nothing.

`kvbaton --from-vllm-router-args` takes a command line of vllm-router 0.1.17 as it is (all that follows is taken for a
part of it) and prints the settings that do the same. Comments name each flag that needs no setting, and each that
kvbaton has nothing for; of the latter there being any is exit code 1, and a command line that vllm-router would not
take, or settings that cannot be used, are 2. `docs/migration.md` goes through all flags.

With `--output json`, `peers`, `trace` and `top --once` print what the router answered (`openapi.yaml`, `Peer`,
`RequestTimeline`, the first frame of `/admin/events`), and `check` an object with `good`, `peers`, `pairs` and
`findings`.

    source <(kvbaton completions bash)      # or zsh, fish, elvish, powershell
    kvbaton man | man -l -                  # kvbaton man --dir DIR writes a page for each subcommand

## Exit codes

| code | what it says |
| --- | --- |
";

/// The whole page.
pub(super) fn page() -> String {
    let mut text = HEAD.to_owned();
    for (code, what) in CODES {
        let _ = writeln!(text, "| {code} | {what} |");
    }
    let mut command = Cli::command().term_width(WIDTH);
    command.build();
    section(&mut text, "kvbaton", &command);
    text
}

fn section(text: &mut String, name: &str, command: &clap::Command) {
    let help = command.clone().term_width(WIDTH).render_long_help().to_string();
    let _ = write!(text, "\n## {name}\n\n```text\n");
    for line in help.trim_end().lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text.push_str("```\n");
    for below in command.get_subcommands() {
        if !below.is_hide_set() && below.get_name() != "help" {
            section(text, &format!("{name} {}", below.get_name()), below);
        }
    }
}

/// A page of the documentation.
#[cfg(test)]
pub(super) struct Page {
    pub(super) name: String,
    pub(super) text: String,
}

/// Every page that people wrote, but records of decisions and of what was seen.
#[cfg(test)]
pub(super) fn pages() -> Vec<Page> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_docs = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["README.md", "integrations/vllm/README.md"].map(|name| root.join(name));
    let pages = of_docs.filter(|path| path.extension().is_some_and(|kind| kind == "md")).chain(others);
    pages
        .map(|path| Page { name: path.display().to_string(), text: std::fs::read_to_string(&path).unwrap() })
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn the_page_of_the_command_line_is_fresh() {
        let page = include_str!("../../docs/cli.md");
        assert!(page == super::page(), "run `kvbaton docs cli > docs/cli.md`");
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    /// The words of the program's calls in code: lines that begin with its name, joined where they go on.
    fn calls(code: &str) -> Vec<Vec<String>> {
        let joined = code.replace("\\\n", " ");
        let lines = joined.lines().map(str::trim_start).filter(|line| line.starts_with("kvbaton "));
        let ends = ["&&", "|", ">", "2>>", "&", ";"];
        lines
            .map(|line| line.split(" #").next().unwrap_or(line))
            .map(|line| line.split_whitespace().take_while(|word| !ends.contains(word)))
            .map(|words| words.map(|word| word.trim_matches(['\'', '"']).to_owned()).collect())
            .collect()
    }

    #[test]
    fn calls_in_the_documentation_are_understood() {
        let mut understood = 0;
        for Page { name, text } in pages() {
            // What blocks print is not a call.
            let blocks = text.split("\n```").skip(1).step_by(2);
            let code: Vec<&str> = blocks.filter(|block| block.starts_with("sh")).collect();
            for call in calls(&code.join("\n")) {
                let parsed = Cli::try_parse_from(&call);
                assert!(parsed.is_ok(), "{name}: {call:?}: {}", parsed.unwrap_err());
                understood += 1;
            }
        }
        assert!(understood >= 25, "{understood}");
    }

    #[test]
    fn every_subcommand_has_a_section() {
        let page = page();
        for name in
            ["serve", "engine", "key new", "peers drain", "top", "trace", "check", "completions", "man"]
        {
            assert!(page.contains(&format!("\n## kvbaton {name}\n")), "{name}");
        }
        assert!(!page.contains("## kvbaton docs"));
    }
}
