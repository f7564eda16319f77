"""Chat templates: what Hugging Face would render, the template's own refusals, and nothing else from inside one."""

from datetime import datetime

import pytest
from text_models import DEFAULT_MODEL, metadata_of, read_data, spm_keys, tokenizer_of

from yeoul.errors import ModelFileError, RequestError
from yeoul.text.template import KEY, MAX_OUTPUT, MAX_SOURCE, ChatTemplate, load_template
from yeoul.text.tokenizer import load_tokenizer

ORACLE = read_data("chat.json")
USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **options) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages, **options)


@pytest.mark.parametrize("model", sorted({case["model"] for case in ORACLE}))
def test_text_and_ids_equal_hugging_face(model) -> None:
    """C5, with the header of the reply and without."""
    template, tokenizer = load_template(metadata_of(model)), tokenizer_of(model)
    assert template is not None
    for case in (case for case in ORACLE if case["model"] == model):
        options = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"]}
        text = template.render(case["messages"], **options)
        assert text == case["text"]
        assert tokenizer.encode_chat(text) == case["ids"]


def test_generation_prompt_is_what_differs() -> None:
    """So that the oracle's two halves cannot both be the same text."""
    with_header, without = ORACLE[0], ORACLE[1]
    assert with_header["model"] == without["model"] == DEFAULT_MODEL
    assert with_header["text"] == without["text"] + "<|im_start|>assistant\n"


@pytest.mark.parametrize("source", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_one_bos_whether_the_template_writes_it_or_not(source) -> None:
    """T1, template and tokenizer together."""
    metadata = spm_keys() | {KEY: source}
    template, tokenizer = load_template(metadata), load_tokenizer(metadata)
    assert template is not None
    assert tokenizer.encode_chat(template.render(USER))[0] == tokenizer.bos_id
    assert tokenizer.encode_chat(template.render(USER)).count(tokenizer.bos_id) == 1


def test_a_model_without_template_has_none() -> None:
    """C3: the caller refuses to chat."""
    assert load_template(spm_keys()) is None


def test_refusal_carries_the_templates_own_message() -> None:
    """C1."""
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(RequestError, match="System role not supported") as caught:
        render(source, [{"role": "system", "content": "x"}])
    assert caught.value.status == 400


class TestWhatTemplatesMayExpect:
    def test_blocks_are_trimmed(self) -> None:
        assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"

    def test_tojson_is_plain_json(self) -> None:
        assert render("{{ {'b': '<한>', 'a': [1, none, true]} | tojson }}") == '{"b": "<한>", "a": [1, null, true]}'
        assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"

    def test_break_and_continue(self) -> None:
        assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
                      "{% endif %}{{ i }}{% endfor %}") == "02"  # fmt: skip

    def test_generation_tag_is_its_content(self) -> None:
        assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"

    def test_time_comes_from_outside(self) -> None:
        now = lambda: datetime(2024, 2, 29, 12)  # noqa: E731
        template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", bos="", eos="", now=now)
        assert template.render(USER) == "29 Feb 2024"

    def test_special_tokens_and_missing_names(self) -> None:
        assert render("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ messages[0].name }}|") == "<s></s>|"
        assert render("{% if tools is none %}none{% endif %}") == "none"

    def test_further_names(self) -> None:
        assert render("{{ enable_thinking }}", enable_thinking=False) == "False"

    @pytest.mark.parametrize("name", ["bos_token", "_x", "a b"])
    def test_names_that_cannot_be_given(self, name) -> None:
        with pytest.raises(RequestError, match=name):
            render("x", **{name: 1})

    def test_loops_know_their_length(self) -> None:
        source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}"
        assert render(source, USER * 3) == "1/3,2/3,3/3."
        source = "{% for m in messages if m.role == 'user' %}{{ loop.length }}{% else %}none{% endfor %}"
        assert render(source, [*USER, {"role": "x"}]) == "1"
        assert render(source, [{"role": "x"}]) == "none"

    def test_namespaces_macros_and_filters(self) -> None:
        source = (
            "{% macro show(m) %}[{{ m.role ~ ':' ~ m.content | trim }}]{% endmacro %}{% set ns = namespace(n=0) %}"
            "{% for m in messages | selectattr('role', 'equalto', 'user') %}{% set ns.n = ns.n + 1 %}{{ show(m) }}"
            "{% endfor %}{{ ns.n }}{{ messages | map(attribute='role') | unique | join('+') }}"
            "{{ messages[0].content.split('i')[0].upper() }}|{{ '%s-%d' | format('x', 7) }}"
        )
        messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]
        assert render(source, messages) == "[user:hi]1user+assistant H|x-7"

    def test_a_long_conversation_is_within_the_bounds(self) -> None:
        metadata = metadata_of(DEFAULT_MODEL)
        template = load_template(metadata)
        assert template is not None
        messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 80} for i in range(2048)]
        assert len(template.render(messages)) > 800_000


class TestFailures:
    @pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{{ x | nosuchfilter }}", "{% include 'a' %}{% bogus %}"])
    def test_a_template_that_does_not_compile_is_refused_at_load(self, source) -> None:
        with pytest.raises(ModelFileError, match="does not compile") as caught:
            load_template(spm_keys() | {KEY: source})
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("deep", ["{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "{% for i in x %}" * 500])
    def test_sources_that_nest_too_deeply_are_refused_at_load(self, deep) -> None:
        with pytest.raises(ModelFileError):
            ChatTemplate(deep, bos="", eos="")

    def test_sources_that_are_too_long_or_no_text(self) -> None:
        with pytest.raises(ModelFileError, match=str(MAX_SOURCE)):
            ChatTemplate("x" * (MAX_SOURCE + 1), bos="", eos="")
        with pytest.raises(ModelFileError, match="not a string"):
            load_template(spm_keys() | {KEY: 7})

    @pytest.mark.parametrize(
        "source",
        ["{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ messages[0]['content'] + none }}",
         "{% include 'other' %}", "{{ messages | first(1, 2) }}",
         "{{ range(3) | tojson }}"],
    )  # fmt: skip
    def test_any_other_failure_is_one_line(self, source) -> None:
        with pytest.raises(RequestError, match="the chat template failed: ") as caught:
            render(source)
        assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)

    def test_messages_of_errors_are_clipped_and_printable(self) -> None:
        with pytest.raises(RequestError) as caught:
            render("{{ raise_exception('a\\n\\u001b[31m' ~ 'x' * 9000) }}")
        assert len(str(caught.value)) < 600 and str(caught.value).isprintable()

    def test_output_is_limited(self) -> None:
        assert len(render(f"{{{{ 'x' * {MAX_OUTPUT} }}}}")) == MAX_OUTPUT
        with pytest.raises(RequestError, match=str(MAX_OUTPUT)):
            render(f"{{{{ 'x' * {MAX_OUTPUT} }}}}y")

    def test_a_failure_leaves_the_template_usable(self) -> None:
        template = ChatTemplate("{% if messages | length > 1 %}{{ 1 / 0 }}{% endif %}ok", bos="", eos="")
        with pytest.raises(RequestError):
            template.render(USER * 2)
        assert template.render(USER) == "ok"
