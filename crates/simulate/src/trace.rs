//! Traces of requests in public formats: Mooncake's JSON lines, which say what prompts have in common, and Azure's
//! CSV, which does not.

use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

/// Most wrong lines that are told.
const MOST_TOLD: usize = 20;

/// Longest prompt and answer, in tokens.
const LONGEST: u64 = 100_000_000;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it comes, after the trace's beginning.
    pub at: Duration,
    /// Tokens of its prompt.
    pub input: u32,
    /// Tokens of its answer, at least one.
    pub output: u32,
    /// What its prompt consists of: equal numbers are equal blocks after equal beginnings. The last one may be
    /// shorter.
    pub blocks: Box<[u64]>,
    /// Requests of one conversation.
    pub session: Option<u64>,
}

/// Requests in the order in which they come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The requests.
    pub requests: Vec<Request>,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// A line that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {number}: {what}")]
pub struct WrongLine {
    /// Its number, from one.
    pub number: usize,
    /// What is wrong with it.
    pub what: String,
}

/// A trace that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// No line has a request.
    #[error("it has no requests")]
    Empty,
    /// Its first line is of no known format.
    #[error(
        "it is neither JSON lines with timestamp, input_length and output_length, nor CSV with TIMESTAMP, ContextTokens and GeneratedTokens"
    )]
    Format,
    /// Some lines cannot be used.
    #[error("{count} wrong lines")]
    Lines {
        /// The first of them.
        first: Vec<WrongLine>,
        /// How many there are.
        count: usize,
    },
}

/// A line of Mooncake's format. Times are in milliseconds.
#[derive(Deserialize)]
struct Line {
    #[serde(alias = "created_time")]
    timestamp: f64,
    #[serde(alias = "input_tokens")]
    input_length: u64,
    #[serde(alias = "output_tokens")]
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
    #[serde(default)]
    session_id: Option<serde_json::Value>,
}

impl Trace {
    /// Reads a trace in either format; `block_tokens` are those of a block that `hash_ids` name.
    ///
    /// # Errors
    /// Its format is not known, it is empty, or lines are wrong; all of them are looked at.
    pub fn read(text: &str, block_tokens: u32) -> Result<Self, TraceError> {
        let lines = || {
            text.lines().enumerate().map(|(at, line)| (at + 1, line.trim_start_matches('\u{feff}').trim()))
        };
        let (_, first) = lines().find(|(_, line)| !line.is_empty()).ok_or(TraceError::Empty)?;
        let mut reader = Reader { block_tokens, requests: Vec::new(), wrong: Vec::new(), count: 0 };
        if first.starts_with('{') {
            for (number, line) in lines().filter(|(_, line)| !line.is_empty()) {
                let read = mooncake(line, block_tokens);
                reader.take(number, read);
            }
        } else {
            let columns = Columns::of(first).ok_or(TraceError::Format)?;
            for (number, line) in lines().filter(|(_, line)| !line.is_empty()).skip(1) {
                let read = columns.read(line);
                reader.take(number, read);
            }
        }
        reader.end()
    }
}

/// A request before the time of the first one is known.
struct Read {
    seconds: f64,
    input: u64,
    output: u64,
    blocks: Vec<u64>,
    session: Option<u64>,
}

struct Reader {
    block_tokens: u32,
    requests: Vec<Read>,
    wrong: Vec<WrongLine>,
    count: usize,
}

impl Reader {
    fn take(&mut self, number: usize, read: Result<Read, String>) {
        let checked = read.and_then(|read| match (read.input, read.output) {
            (1..=LONGEST, 0..=LONGEST) => Ok(read),
            (0, _) => Err("its prompt has no tokens".to_owned()),
            _ => Err(format!("more than {LONGEST} tokens")),
        });
        match checked {
            Ok(read) => self.requests.push(read),
            Err(what) => {
                self.count += 1;
                if self.wrong.len() < MOST_TOLD {
                    self.wrong.push(WrongLine { number, what });
                }
            }
        }
    }

    fn end(mut self) -> Result<Trace, TraceError> {
        if self.count > 0 {
            return Err(TraceError::Lines { first: self.wrong, count: self.count });
        }
        self.requests.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let begin = self.requests.first().ok_or(TraceError::Empty)?.seconds;
        let block_tokens = self.block_tokens;
        let requests = self.requests.into_iter().enumerate().map(|(at, read)| Request {
            at: Duration::from_secs_f64(read.seconds - begin),
            input: read.input as u32,
            // An answer without a token has a first one all the same: its end.
            output: read.output.max(1) as u32,
            blocks: filled(read.blocks, read.input, block_tokens, at as u64),
            session: read.session,
        });
        Ok(Trace { requests: requests.collect(), block_tokens })
    }
}

/// The blocks of a prompt; those that are not named are like no others.
pub(crate) fn filled(mut named: Vec<u64>, input: u64, block_tokens: u32, request: u64) -> Box<[u64]> {
    let count = input.div_ceil(u64::from(block_tokens));
    let own = (1 << 63) | (request << 24);
    named.extend((named.len() as u64..count).map(|at| own + at));
    named.into_boxed_slice()
}

fn mooncake(line: &str, block_tokens: u32) -> Result<Read, String> {
    let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if !(0.0..=1e15).contains(&line.timestamp) {
        return Err("its timestamp is no time".to_owned());
    }
    if line.hash_ids.len() as u64 > line.input_length.div_ceil(u64::from(block_tokens)) {
        let (ids, tokens) = (line.hash_ids.len(), line.input_length);
        return Err(format!("{ids} hash_ids are too many for {tokens} tokens in blocks of {block_tokens}"));
    }
    if line.hash_ids.iter().any(|id| *id >= 1 << 63) {
        return Err("its hash_ids are too large".to_owned());
    }
    let session = line.session_id.map(|session| crate::plan::spread(session.to_string().as_bytes()));
    let (input, output) = (line.input_length, line.output_length);
    Ok(Read { seconds: line.timestamp / 1000.0, input, output, blocks: line.hash_ids, session })
}

/// The places of the columns that count.
struct Columns {
    time: usize,
    input: usize,
    output: usize,
}

impl Columns {
    fn of(header: &str) -> Option<Self> {
        let names: Vec<String> =
            header.split(',').map(|name| name.trim().trim_matches('"').to_lowercase()).collect();
        let place = |wanted: &str| names.iter().position(|name| name == wanted);
        Some(Self {
            time: place("timestamp")?,
            input: place("contexttokens")?,
            output: place("generatedtokens")?,
        })
    }

    fn read(&self, line: &str) -> Result<Read, String> {
        let fields: Vec<&str> = line.split(',').map(|field| field.trim().trim_matches('"')).collect();
        let field = |place: usize| fields.get(place).copied().ok_or_else(|| "a column is missing".to_owned());
        let number = |place: usize| {
            let text = field(place)?;
            text.parse::<u64>().map_err(|_| format!("{text:?} is no number of tokens"))
        };
        let time = field(self.time)?;
        let seconds = seconds_of(time).ok_or_else(|| format!("{time:?} is no time"))?;
        let (input, output) = (number(self.input)?, number(self.output)?);
        Ok(Read { seconds, input, output, blocks: Vec::new(), session: None })
    }
}

/// Seconds of `2023-11-16 18:15:46.6805900`, with `T` or an offset such as `+00:00` too, since some day.
fn seconds_of(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    if !((1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day)) {
        return None;
    }
    let (time, ahead) = match time.trim_end_matches('Z').split_once(['+', '-']) {
        None => (time.trim_end_matches('Z'), 0.0),
        Some((clock, offset)) => {
            let (hours, minutes) = offset.split_once(':').unwrap_or((offset, "0"));
            let ahead = hours.parse::<f64>().ok()? * 3600.0 + minutes.parse::<f64>().ok()? * 60.0;
            (clock, if time.contains('-') { -ahead } else { ahead })
        }
    };
    let mut clock = time.splitn(3, ':');
    let (hour, minute) = (clock.next()?.parse::<f64>().ok()?, clock.next()?.parse::<f64>().ok()?);
    let second = clock.next()?.parse::<f64>().ok()?;
    if !((0.0..24.0).contains(&hour) && (0.0..60.0).contains(&minute) && (0.0..61.0).contains(&second)) {
        return None;
    }
    // Days of the civil calendar, with years that begin in March.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    Some(days as f64 * 86_400.0 + hour * 3600.0 + minute * 60.0 + second - ahead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mooncake_lines_say_what_prompts_have_in_common() {
        let text = "{\"timestamp\": 27482, \"input_length\": 1030, \"output_length\": 52, \"hash_ids\": [46, 47, 2353]}\n\
                    \n{\"timestamp\": 27000.5, \"input_length\": 600, \"output_length\": 0}\n";
        let trace = Trace::read(text, 512).unwrap();
        let [first, second] = &trace.requests[..] else { panic!("{trace:?}") };
        assert_eq!((first.at, first.input, first.output), (Duration::ZERO, 600, 1));
        assert_eq!(first.blocks.len(), 2);
        assert_eq!(second.at, Duration::from_micros(481_500));
        assert_eq!((second.input, second.output, &second.blocks[..]), (1030, 52, &[46, 47, 2353][..]));
    }

    #[test]
    fn azure_times_are_read_to_the_tick() {
        let text = "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n\
                    2023-11-17 00:00:00,396,109\r\n2023-11-17T00:00:00.5+00:00,7,1\r\n";
        let trace = Trace::read(text, 512).unwrap();
        let at: Vec<f64> = trace.requests.iter().map(|request| request.at.as_secs_f64()).collect();
        assert!((at[1] - (5.0 * 3600.0 + 44.0 * 60.0 + 13.31941)).abs() < 1e-4, "{at:?}");
        assert!((at[2] - at[1] - 0.5).abs() < 1e-4, "{at:?}");
        assert_eq!((trace.requests[0].input, trace.requests[0].output), (374, 44));
        assert_ne!(trace.requests[0].blocks, trace.requests[1].blocks, "nothing is shared");
    }

    #[test]
    fn leap_days_are_days() {
        let day = |text: &str| seconds_of(&format!("{text} 00:00:00")).unwrap() / 86_400.0;
        assert_eq!(day("2024-03-01") - day("2024-02-28"), 2.0);
        assert_eq!(day("2023-03-01") - day("2023-02-28"), 1.0);
        assert_eq!(day("2024-01-01") - day("2023-12-31"), 1.0);
        assert_eq!(seconds_of("2024-05-10 02:00:00+02:00"), seconds_of("2024-05-10 00:00:00"));
        assert_eq!(seconds_of("yesterday"), None);
        assert_eq!(seconds_of("2024-13-01 00:00:00"), None);
    }

    #[test]
    fn all_wrong_lines_are_told_with_their_numbers() {
        let text = "{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 1}\nnothing\n\
                    {\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1}\n\n\
                    {\"timestamp\": 0, \"input_length\": 10, \"output_length\": 1, \"hash_ids\": [1, 2]}\n";
        let Err(TraceError::Lines { first, count }) = Trace::read(text, 512) else { panic!() };
        assert_eq!((count, first.iter().map(|line| line.number).collect::<Vec<_>>()), (3, vec![2, 3, 5]));
        assert_eq!(first[2].what, "2 hash_ids are too many for 10 tokens in blocks of 512");
        let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\nnow,1,1\n2023-11-16 18:15:46,1\n";
        let Err(TraceError::Lines { first, .. }) = Trace::read(csv, 512) else { panic!() };
        let told: Vec<String> = first.iter().map(ToString::to_string).collect();
        assert_eq!(
            told,
            [
                "line 2: \"x\" is no number of tokens",
                "line 3: \"now\" is no time",
                "line 4: a column is missing"
            ]
        );
        assert_eq!(Trace::read("a,b\n1,2\n", 512), Err(TraceError::Format));
        assert_eq!(Trace::read("\n", 512), Err(TraceError::Empty));
    }
}
