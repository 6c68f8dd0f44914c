"""LangChain's client of OpenAI."""

import asyncio

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def model(router):
    return ChatOpenAI(
        model="sim", base_url=router.base, api_key="unused", temperature=0, max_tokens=200, max_retries=0, seed=1
    )


def test_invoke_and_stream_say_the_same(model):
    whole = model.invoke("hello")
    assert len(whole.content) == 200 and whole.usage_metadata["output_tokens"] == 200
    chunks = list(model.stream("hello", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 200


def test_batch_and_async(model):
    texts = [answer.content for answer in model.batch(["a", "b", "c"])]

    async def run():
        return await asyncio.gather(*(model.ainvoke(text) for text in "abc"))

    assert texts == [answer.content for answer in asyncio.run(run())]


def test_tools(model):
    bound = model.bind_tools([weather])
    asked = bound.invoke("what is the weather?")
    (call,) = asked.tool_calls
    assert (call["name"], list(call["args"])) == ("weather", ["city"])
    gathered = None
    for chunk in bound.stream("what is the weather?"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == call["args"]
    said = weather.invoke(call)
    assert isinstance(said, ToolMessage)
    answer = bound.invoke([HumanMessage("what is the weather?"), asked, said])
    assert answer.tool_calls == [] and len(answer.content) == 200


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model, method):
    assert isinstance(model.with_structured_output(Person, method=method).invoke("who?"), Person)


def test_json_mode(model):
    assert list(model.with_structured_output(None, method="json_mode").invoke("json, please")) == ["answer"]


def test_completions(router):
    model = OpenAI(model="sim", base_url=router.base, api_key="unused", temperature=0, max_tokens=16, max_retries=0)
    whole = model.invoke("Once upon a time")
    assert len(whole) == 16 and "".join(model.stream("Once upon a time")) == whole
