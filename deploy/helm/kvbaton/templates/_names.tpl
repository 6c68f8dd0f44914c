{{- define "kvbaton.labels" -}}
app.kubernetes.io/name: kvbaton
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kvbaton.selector" -}}
app.kubernetes.io/name: kvbaton
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end }}
