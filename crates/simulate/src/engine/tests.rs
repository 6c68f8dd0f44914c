use super::*;

fn settings() -> EngineSettings {
    EngineSettings {
        prefill_tokens_per_second: 1000.0,
        prefill_start: Duration::ZERO,
        decode_step: Duration::from_millis(20),
        decode_sequence: Duration::ZERO,
        max_num_batched_tokens: 128,
        kv_tokens: 1600,
        ..EngineSettings::default()
    }
}

fn work(request: u32, prompt: u32, output: u32, first: u64) -> Work {
    let names = (first..first + u64::from(prompt.div_ceil(64))).collect();
    Work { request, prompt, output, names, pulls: false }
}

/// Runs an engine until it has nothing to do: when which request got which token, in milliseconds.
fn tokens(engine: &mut Engine) -> Vec<(u128, u32, u32)> {
    let (mut now, mut got, mut pulls) = (Duration::ZERO, Vec::new(), Vec::new());
    while let Some(takes) = engine.begin(&mut pulls) {
        now += takes;
        let mut tokens = Vec::new();
        engine.end(&mut tokens, &mut Vec::new());
        got.extend(tokens.into_iter().map(|token| (now.as_millis(), token.request, token.number)));
    }
    got
}

#[test]
fn a_prompt_is_computed_in_chunks_and_then_tokens_come_by_steps() {
    let mut engine = Engine::new(settings(), 64, false);
    engine.submit(work(1, 300, 3, 0));
    assert_eq!(tokens(&mut engine), [(300, 1, 1), (320, 1, 2), (340, 1, 3)]);
    assert_eq!((engine.told.computed, engine.told.generated), (300, 3));
    assert_eq!(engine.memory.available(), 100, "all is given back");
}

#[test]
fn a_prompt_that_comes_holds_up_those_that_run() {
    let mut engine = Engine::new(settings(), 64, false);
    engine.submit(work(1, 64, 4, 0));
    let mut pulls = Vec::new();
    assert_eq!(engine.begin(&mut pulls), Some(Duration::from_millis(64)));
    engine.end(&mut Vec::new(), &mut Vec::new());
    engine.submit(work(2, 100, 1, 100));
    assert_eq!(engine.begin(&mut pulls), Some(Duration::from_millis(120)), "a token and a prompt");
}

#[test]
fn what_is_cached_is_not_computed_again() {
    let mut engine = Engine::new(settings(), 64, false);
    engine.submit(work(1, 320, 1, 0));
    tokens(&mut engine);
    engine.submit(Work { names: Box::new([0, 1, 2, 3, 77]), ..work(2, 300, 1, 0) });
    assert_eq!(tokens(&mut engine), [(44, 2, 1)], "four of five blocks are there");
    engine.submit(work(3, 320, 1, 0));
    assert_eq!(tokens(&mut engine), [(16, 3, 1)], "the last block is computed again");
    assert_eq!(engine.cached(&[0, 1, 2, 3, 4], 320), 304);
    assert_eq!((engine.told.looked_up, engine.told.found), (940, 560));
}

#[test]
fn without_room_the_newest_gives_way_and_all_end() {
    let mut engine = Engine::new(settings(), 64, false);
    (0..4).for_each(|request| engine.submit(work(request, 320, 300, 1000 * u64::from(request))));
    let got = tokens(&mut engine);
    assert!(engine.told.preemptions > 0);
    for request in 0..4 {
        let numbers: Vec<u32> = got.iter().filter(|token| token.1 == request).map(|token| token.2).collect();
        assert_eq!(numbers, (1..=300).collect::<Vec<_>>(), "each token comes once, in order");
    }
    assert_eq!(engine.memory.available(), 100);
}

#[test]
fn a_prompt_that_is_read_costs_a_token() {
    let mut engine = Engine::new(settings(), 64, false);
    engine.submit(Work { pulls: true, ..work(1, 300, 2, 0) });
    let mut pulls = Vec::new();
    assert_eq!(engine.begin(&mut pulls), None);
    assert_eq!(pulls, [Pull { seat: 0, request: 1, tokens: 300 }]);
    assert_eq!(engine.begin(&mut pulls), None, "it is on its way");
    engine.pulled(0);
    assert_eq!(tokens(&mut engine), [(20, 1, 1), (40, 1, 2)]);
    engine.submit(Work { pulls: true, ..work(2, 300, 2, 0) });
    pulls.clear();
    engine.begin(&mut pulls);
    assert_eq!(pulls[0].tokens, 300 - 288, "what is here already is not read");
}

#[test]
fn blocks_are_kept_until_they_are_read() {
    let mut engine = Engine::new(settings(), 64, true);
    engine.submit(work(1, 1500, 1, 0));
    engine.submit(work(2, 1500, 1, 1000));
    let (mut pulls, mut got, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    while engine.begin(&mut pulls).is_some() {
        engine.end(&mut got, &mut kept);
    }
    assert_eq!((got.len(), kept.len()), (1, 1), "the second one has no room");
    engine.was_read(&kept[0].pieces);
    assert!(engine.begin(&mut pulls).is_some());
}
