"""The official Python SDK of OpenAI."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Tell me of the sea, in a few words."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


@pytest.fixture(scope="module")
def client(router):
    with OpenAI(base_url=router.base, api_key="unused", max_retries=0) as client:
        yield client


def chat(client, **more):
    return client.chat.completions.create(
        **{"model": "sim", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **more}
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").id == "sim"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("absent")
    assert refused.value.code == "model_not_found"


def test_chat_streamed_and_whole_say_the_same(client, router):
    before = router.metric("kvbaton_handoffs_total", 'result="relayed"')
    whole = chat(client)
    text = whole.choices[0].message.content
    assert (len(text), whole.choices[0].finish_reason, whole.usage.completion_tokens) == (24, "length", 24)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert (chunks[-1].choices, chunks[-1].usage) != ([], None)
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert router.metric("kvbaton_handoffs_total", 'result="relayed"') == before + 2


def test_completions_streamed_and_whole_say_the_same(client):
    ask = {"model": "sim", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    assert (len(whole.choices[0].text), whole.choices[0].finish_reason) == (12, "length")
    pieces = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == 12


def test_raw_response_has_the_request_id(client):
    raw = client.chat.completions.with_raw_response.create(
        model="sim", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "from-the-sdk"}
    )
    assert raw.headers["x-request-id"] == "from-the-sdk"
    assert raw.parse()._request_id == "from-the-sdk"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_tool_calls(client, choice, reason):
    ask = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
    whole = chat(client, **ask).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == (reason, None, "weather")
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] == "c" and len(arguments["city"]) == 8

    with client.chat.completions.stream(
        model="sim", messages=MESSAGES, temperature=0, **ask
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls
    assert (streamed.finish_reason, json.loads(again.function.arguments)) == (reason, arguments)

    if choice == "auto":
        told = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "14 degrees"},
        ]
        answer = chat(client, messages=told, tools=[WEATHER]).choices[0]
        assert (answer.message.tool_calls, len(answer.message.content)) == (None, 24)


def test_no_tool_is_called_where_none_may_be(client):
    answer = chat(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert (answer.message.tool_calls, answer.finish_reason) == (None, "length")


def test_json_mode(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert (answer.finish_reason, list(json.loads(answer.message.content))) == ("stop", ["answer"])


def test_structured_output(client):
    ask = {"model": "sim", "messages": MESSAGES, "response_format": Person, "max_tokens": 300, "temperature": 0}
    person = client.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(person, Person) and len(person.tags) == 1
    with client.chat.completions.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == person
    assert {"content.delta", "content.done", "chunk"} <= kinds


def test_logprobs(client):
    for stream in (False, True):
        answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=4, stream=stream)
        if stream:
            entries = [e for c in answer if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        else:
            entries = answer.choices[0].logprobs.content
        assert len(entries) == 4 and all(entry.logprob < 0 and len(entry.top_logprobs) == 3 for entry in entries)
    completion = client.completions.create(model="sim", prompt="a b", max_tokens=3, logprobs=2)
    assert len(completion.choices[0].logprobs.tokens) == 3


def test_several_choices(client):
    whole = chat(client, n=3, temperature=1, seed=7)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts = ["", "", ""]
    for chunk in chat(client, n=3, temperature=1, seed=7, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_stop(client):
    full = chat(client).choices[0].message.content
    cut = chat(client, stop=[full[5:8]]).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("stop", full[: full.find(full[5:8])])


def test_responses(client):
    whole = client.responses.create(model="sim", input="hello", max_output_tokens=8, temperature=0)
    assert len(whole.output_text) == 8
    deltas = ""
    for event in client.responses.create(
        model="sim", input="hello", max_output_tokens=8, temperature=0, stream=True
    ):
        deltas += event.delta if event.type == "response.output_text.delta" else ""
    assert deltas == whole.output_text


def test_embeddings(client):
    assert len(client.embeddings.create(model="sim", input="hello", encoding_format="float").data) == 1


def test_errors_are_the_sdks_own(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="absent")
    assert unknown.value.status_code == 404 and "absent" in unknown.value.message
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        chat(client, messages="no list")
    with pytest.raises(openai.BadRequestError):
        chat(client, tool_choice="auto")
    # A prefill engine is told nothing new of a stream's options, a decode engine refuses them.
    with pytest.raises(openai.BadRequestError) as options:
        chat(client, stream_options={"include_usage": True})
    assert options.value.param == "stream_options"


def test_keys(keyed):
    router, key = keyed
    for wrong, code in (("sk-wrong", "invalid_api_key"),):
        with OpenAI(base_url=router.base, api_key=wrong, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                chat(client)
        assert refused.value.code == code
    with OpenAI(base_url=router.base, api_key=key, max_retries=0) as client:
        assert len(chat(client).choices[0].message.content) == 24


@pytest.mark.parametrize("status", [429, 503])
def test_the_sdk_tries_again_after_a_refusal_for_now(router, status):
    error = {"error": {"message": "later", "type": "overloaded", "param": None, "code": status}}
    fault = {"kind": "refuse", "status": status, "body": error, "leg": "any"}
    # One on each engine: a 503 of the prefill engine makes the router look for another one first.
    router.arm(router.decode, fault)
    labels = ('endpoint="chat_completions"', f'status="{status}"')
    before = router.metric("kvbaton_requests_total", *labels)
    with OpenAI(base_url=router.base, api_key="unused", max_retries=3) as client:
        assert len(chat(client).choices[0].message.content) == 24
    assert router.metric("kvbaton_requests_total", *labels) == before + 1


def test_without_engines_the_sdk_gives_up_with_its_own_error(empty):
    with OpenAI(base_url=empty.base, api_key="unused", max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client)
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")
    assert empty.metric("kvbaton_requests_total", 'status="503"') == 2


def test_an_engine_that_breaks_off_inside_a_stream_is_an_error(client, router):
    router.arm(router.decode, {"kind": "reset", "after_bytes": 1500, "leg": "decode"})
    with pytest.raises(openai.APIError):
        for _ in chat(client, stream=True, max_tokens=400):
            pass


def test_a_stream_that_is_left_ends_at_the_engine(client, router):
    router.arm(router.decode, {"kind": "slow_chunks", "millis": 20, "leg": "decode", "sticky": True})
    before = router.metric("kvbaton_requests_total", 'outcome="abandoned"', 'status="499"')
    stream = chat(client, stream=True, max_tokens=2000)
    for _, _chunk in zip(range(3), stream):
        pass
    stream.close()
    router.until(
        lambda: router.metric("kvbaton_requests_total", 'outcome="abandoned"', 'status="499"') == before + 1
    )
    router.until(lambda: router.stats(router.decode)["blocks_held"] == 0)


def test_async_client(router):
    async def run():
        async with AsyncOpenAI(base_url=router.base, api_key="unused", max_retries=0) as client:
            whole = await asyncio.gather(*(chat(client, seed=seed) for seed in range(8)))
            streams = await asyncio.gather(*(chat(client, seed=seed, stream=True) for seed in range(8)))

            async def text(stream):
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

            return [answer.choices[0].message.content for answer in whole], await asyncio.gather(*map(text, streams))

    whole, streamed = asyncio.run(run())
    assert whole == streamed and len(whole) == 8
